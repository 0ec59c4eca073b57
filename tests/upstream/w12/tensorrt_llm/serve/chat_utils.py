"""Facts: serving.md §2 (ids of calls, by type)."""

import uuid


def make_tool_call_id(id_type="random", func_name=None, idx=None):
    return f"functions.{func_name}:{idx}" if id_type == "kimi_k2" else f"chatcmpl-tool-{uuid.uuid4().hex}"
