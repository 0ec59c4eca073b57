"""`make delivery`: what streaming tool parsers lose of speculative deltas, without and with the splitter."""
