"""What can go wrong, by name. Every refusal of the installer is one of these classes; each carries one clear
sentence, the place it is about and the next step, and says which exit status it means. This module must not know how
errors are printed, nor anything about trees or patches."""

# ruff: noqa: N818 - a refusal is named for what is the matter; users read these names in messages and JSON

from __future__ import annotations


class InstallerError(Exception):
    """A refusal: `what` went wrong, at which `place`, and the `next_step` that helps."""

    exit_status = 1

    def __init__(self, what: str, *, place: str = "", next_step: str = "", detail: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.place = place
        self.next_step = next_step
        self.detail = detail

    @property
    def name(self) -> str:
        return type(self).__name__


class NotATree(InstallerError):
    """The path given holds no `tensorrt_llm` package."""

    exit_status = 2


class SeriesInvalid(InstallerError):
    """The series or one of its rules is broken; no tree can help that."""

    exit_status = 2


class ExportFolderInUse(InstallerError):
    """The folder to export to already holds something."""

    exit_status = 2


class WindowUnknown(InstallerError):
    """No window's names were all found."""


class WindowAmbiguous(InstallerError):
    """The names of more than one window were found."""


class AnchorsDoNotFit(InstallerError):
    """At least one patch found no anchor, or too many."""


class PatchesOverlap(InstallerError):
    """Two patches of the series cover the same statement."""


class PartlyPatched(InstallerError):
    """The tree carries some of the patches but no manifest of ours."""


class CannotCompile(InstallerError):
    """A patched or added file would not compile."""


class UnreadableSource(InstallerError):
    """A file that the series names cannot be read as Python source text."""


class FileInTheWay(InstallerError):
    """Something that is not ours stands where an overlay file goes."""


class OverlayModified(InstallerError):
    """An overlay file was edited after it was added."""


class PatchedFileModified(InstallerError):
    """A patched file was edited after it was patched."""


class PathLeavesTree(InstallerError):
    """A path goes through a symbolic link."""


class ReadOnlyTree(InstallerError):
    """The tree cannot be written."""


class WriteFailed(InstallerError):
    """A write failed half-way; everything was put back."""


class TreeBusy(InstallerError):
    """Another apply or revert holds the tree."""


class TreeInterrupted(InstallerError):
    """An earlier apply or revert did not finish."""


class StateDamaged(InstallerError):
    """What the installer noted down about the tree cannot be read or is incomplete."""


class NothingToExport(InstallerError):
    """No patch of the series is left to export for this tree."""
