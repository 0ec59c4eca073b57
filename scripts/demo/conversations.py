"""Harmony turns with tool calls, written at random: what the demo's language model is counted from.

A *kind* stands for the prompt of a request: it fixes which messages the turn holds, in order, and so how many
tool calls are planned. The words inside are drawn. Nothing here knows tokens, models or the commit stage.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from string import Template

FILLERS = {
    "city": ("Paris", "Tokyo", "Lima", "Oslo", "Cairo", "New York", "San Francisco", "Cape Town", "Kyoto", "Quito"),
    "days": ("1", "2", "3", "5", "7", "10", "14"),
    "unit": ("celsius", "fahrenheit", "kelvin"),
    "topic": (
        "refund policy",
        "parental leave",
        "travel expenses",
        "laptop setup",
        "data retention",
        "remote work",
        "security training",
        "meeting room booking",
        "printer drivers",
        "health insurance",
    ),
    "section": ("handbook", "wiki", "helpdesk", "intranet"),
    "limit": ("3", "5", "8", "20"),
    "person": ("Alice", "Omar", "Mei", "Jonas", "Priya", "Lucia", "Kofi", "Elena"),
    "weekday": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday"),
    "title": ("Budget review", "Design sync", "Planning session", "Customer call", "Weekly retrospective"),
    "hour": ("09:00", "10:30", "11:00", "14:00", "15:30", "16:45"),
    "minutes": ("5", "10", "15", "25", "30", "45"),
    "label": ("pasta", "laundry", "tea", "stretching", "bread dough"),
    "thing": ("the sky", "the sea", "a sunset", "glacier ice", "a rainbow", "the moon"),
    "reason": ("scattering of light", "how water absorbs red light", "dust in the air", "refraction in droplets"),
}


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a turn.

    Attributes:
        channel: `analysis`, `commentary` or `final`.
        parts: the body, a choice of templates for each of its pieces.
        tool: name of the function that it calls, if it does.
        recipient_first: whether the header names the function before the channel; gpt-oss writes both.
    """

    channel: str
    parts: tuple[tuple[str, ...], ...]
    tool: str | None = None
    recipient_first: bool = False

    @property
    def header(self) -> str:
        """From behind `<|start|>assistant` up to and with `<|message|>`."""
        if self.tool is None:
            return f"<|channel|>{self.channel}<|message|>"
        if self.recipient_first:
            return f" to=functions.{self.tool}<|channel|>{self.channel} json<|message|>"
        return f"<|channel|>{self.channel} to=functions.{self.tool} <|constrain|>json<|message|>"


@dataclass(frozen=True, slots=True)
class Kind:
    """What a request asks for: the messages of the turn that answers it, and how common it is."""

    name: str
    weight: int
    messages: tuple[Message, ...]

    @property
    def calls(self) -> int:
        """How many calls the turn makes."""
        return sum(m.tool is not None for m in self.messages)


KINDS = (
    Kind(
        "weather",
        20,
        (
            Message(
                "analysis",
                (
                    ("The user asks about the weather in $city.", "We need the forecast for $city.", "Weather, $city."),
                    (" They want $days days.", " The period is $days days.", ""),
                    (" Use get_weather.", " Let me call the weather tool.", " I should look it up."),
                ),
            ),
            Message("commentary", (('{"city": "$city", "days": $days, "unit": "$unit"}',),), tool="get_weather"),
        ),
    ),
    Kind(
        "search",
        20,
        (
            Message(
                "analysis",
                (
                    ("Question about $topic.", "The user wants to know our rules on $topic.", "They ask: $topic."),
                    (" The $section should have it.", " Search the $section first.", " Not something to guess."),
                ),
            ),
            Message("commentary", (("Let me look that up.", "One moment, I am checking the $section."),)),
            Message(
                "commentary",
                (('{"query": "$topic", "limit": $limit, "source": "$section"}',),),
                tool="search_docs",
                recipient_first=True,
            ),
        ),
    ),
    Kind(
        "meeting",
        20,
        (
            Message(
                "analysis",
                (
                    ("Schedule a meeting with $person on $weekday.", "The user wants to meet $person on $weekday."),
                    (" First find a free slot, then book it.", " Check the calendar and book.", " Two calls."),
                ),
            ),
            Message("commentary", (('{"person": "$person", "weekday": "$weekday"}',),), tool="find_free_slot"),
            Message(
                "commentary",
                (('{"title": "$title", "with": "$person", "at": "$hour"}',),),
                tool="create_event",
            ),
        ),
    ),
    Kind(
        "trip",
        20,
        (
            Message(
                "analysis",
                (
                    ("A trip to $city.", "They plan to travel to $city.", "The user leaves for $city on $weekday."),
                    (" Flights, then a hotel, then the weather.", " Three calls.", " Several tools are needed."),
                ),
            ),
            Message("commentary", (("I will check flights, hotels and weather.", "Let me look at $city."),)),
            Message("commentary", (('{"to": "$city", "day": "$weekday"}',),), tool="search_flights"),
            Message("commentary", (('{"where": "$city", "nights": $days}',),), tool="search_hotels"),
            Message("commentary", (('{"city": "$city", "days": $days, "unit": "$unit"}',),), tool="get_weather"),
        ),
    ),
    Kind(
        "timer",
        15,
        (Message("commentary", (('{"label": "$label", "minutes": $minutes}',),), tool="set_timer"),),
    ),
    Kind(
        "answer",
        15,
        (
            Message("analysis", (("Simple question about $thing.", "No tool needed."), (" Explain $reason.", ""))),
            Message(
                "final",
                (
                    ("The colour of $thing comes from $reason.", "What you see in $thing is due to $reason."),
                    (" It changes during the day.", " Ask me for more detail if you like.", ""),
                ),
            ),
        ),
    ),
)

TOOLS = frozenset(m.tool for kind in KINDS for m in kind.messages if m.tool is not None)


def write_turn(kind: Kind, choose: random.Random) -> str:
    """A turn of this kind, from behind `<|start|>assistant` to its terminal, control tokens by name."""
    drawn = {name: choose.choice(values) for name, values in FILLERS.items()}
    messages = []
    for message in kind.messages:
        body = "".join(Template(choose.choice(part)).substitute(drawn) for part in message.parts)
        messages.append(message.header + body)
    terminal = "<|return|>" if kind.messages[-1].tool is None else "<|call|>"
    return "<|end|><|start|>assistant".join(messages) + terminal


def draw_kinds(count: int, choose: random.Random) -> list[int]:
    """Indices into `KINDS` for `count` requests."""
    return choose.choices(range(len(KINDS)), weights=[k.weight for k in KINDS], k=count)
