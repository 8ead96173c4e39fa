"""URLs of a Redis with a password: valid, wrong and malformed."""

CANARY = "c4n4ry-in-a-coal-mine"
"""No output may contain it, nor its beginning or end."""

NOWHERE = "127.0.0.1:1"

FORMS = (
    # A password that is not encoded, with every delimiter of a URL.
    *(f"redis://:{CANARY}{c}x@{NOWHERE}/0" for c in "/?#@:[]% \\\t'\"&="),
    *(f"redis://:a{c}{CANARY}@{NOWHERE}/0" for c in "/?#@[]% \\\t'\"&="),
    *(f"redis://me:1{c}{CANARY}@{NOWHERE}/0" for c in "/?#"),
    f"redis://:{CANARY}/%zz@h[/0",
    # In the wrong place.
    f"redis://{NOWHERE}/0?password={CANARY}",
    f"redis://{NOWHERE}/0?nonsense=1&password={CANARY}",
    f"redis://{NOWHERE}/0?{CANARY}",
    f"redis://{NOWHERE}/0?passwd={CANARY}",
    f"redis://{NOWHERE}/0#{CANARY}",
    f"unix://nowhere.sock?password={CANARY}",
    f"redis+cluster://{NOWHERE}?password={CANARY}",
    f"redis+sentinel://{NOWHERE}/name/0?password={CANARY}",
    f"redis://{CANARY}@{NOWHERE}",
    f"redis://{CANARY}:@{NOWHERE}",
    # A part is missing or superfluous.
    f":{CANARY}@{NOWHERE}",
    f"me:{CANARY}@{NOWHERE}",
    f"{CANARY}@{NOWHERE}",
    f"redis:/:{CANARY}@{NOWHERE}",
    f"redis:///:{CANARY}@{NOWHERE}",
    f"redis//:{CANARY}@{NOWHERE}",
    f"redis://:{CANARY}",
    f"redis://me:{CANARY}",
    f"redis://:{CANARY}@:1",
    f"redis://:{CANARY}@127.0.0.1:port/0",
    f"redis://:{CANARY}@127.0.0.1:99999/0",
    f"redis://:{CANARY}@[::1/0",
    f"redis://:{CANARY}@{NOWHERE}/database",
    f"redis://:{CANARY}@{NOWHERE}/0?nonsense=1",
    f"http://me:{CANARY}@{NOWHERE}/0",
    f"redis+other://me:{CANARY}@{NOWHERE}/0",
    f"URL=redis://me:{CANARY}@{NOWHERE}/0",
    f"redis+sentinel://me:{CANARY}@{NOWHERE}",
    f"redis+cluster://me:{CANARY}@{NOWHERE}/7",
    # Valid.
    f"redis://:{CANARY}@{NOWHERE}/0",
    f"redis://me:{CANARY}@{NOWHERE}/0",
    f"redis://me:%61{CANARY}%2Fx@{NOWHERE}/0",
    f"rediss://me:{CANARY}@{NOWHERE}/0",
    f"unix://me:{CANARY}@/nowhere.sock",
    f"redis+sentinel://me:{CANARY}@{NOWHERE},127.0.0.1:2/name/0",
    f"redis+cluster://me:{CANARY}@{NOWHERE}",
)


def told(text: str) -> bool:
    """Whether a text contains the canary, or a piece of six characters of it."""
    return any(CANARY[at : at + 6] in text for at in range(len(CANARY) - 5))
