"""Facts: acceptance.md §4, executor.md §1.8; no patch here, the body is shared."""

from tests.upstream.common.spec_sampler import SpecSampler


class SpecSamplerBase(SpecSampler):
    """Named as upstream names it."""
