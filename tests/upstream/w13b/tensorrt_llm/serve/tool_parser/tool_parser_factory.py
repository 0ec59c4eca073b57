"""Facts: serving.md §4. The parsers are SGLang's, from which upstream's base comes."""

from __future__ import annotations

from tests.upstream.common.parsers import PARSERS


class ToolParserFactory:
    parsers = PARSERS

    @staticmethod
    def create_tool_parser(tool_parser):
        try:
            tool_parser_class = ToolParserFactory.parsers[tool_parser.lower()]()
            return tool_parser_class()
        except KeyError as e:
            raise ValueError(f"Invalid tool_parser: {tool_parser}") from e
