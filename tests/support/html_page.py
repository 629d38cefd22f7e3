"""A page as a browser reads it."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """Collects what a browser would fetch, the text, and whether tags close."""

    VOID = ("meta", "br", "hr", "img", "link", "input", "line", "circle", "rect", "polygon",
            "polyline")  # fmt: skip

    def __init__(self, html: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.episodes: list[dict[str, str]] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        fetched = [given[k] for k in ("src", "href", "srcset", "data") if given.get(k)]
        self.fetched += [address for address in fetched if not address.startswith("#")]
        if tag == "a":
            self.links += [address[1:] for address in fetched if address.startswith("#")]
        self.ids += [given["id"]] if "id" in given else []
        self.episodes += [given] if given.get("class") == "episode" else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)
