"""URLs of a Redis with a password: valid, wrong and malformed."""

PASSWORD = "c4n4ry-in-a-coal-mine"
"""No output may contain it, nor its beginning or end."""

NOWHERE = "127.0.0.1:1"

FORMS = (
    # A password that is not encoded, with every delimiter of a URL.
    *(f"redis://:{PASSWORD}{c}x@{NOWHERE}/0" for c in "/?#@:[]% \\\t'\"&="),
    *(f"redis://:a{c}{PASSWORD}@{NOWHERE}/0" for c in "/?#@[]% \\\t'\"&="),
    *(f"redis://me:1{c}{PASSWORD}@{NOWHERE}/0" for c in "/?#"),
    f"redis://:{PASSWORD}/%zz@h[/0",
    # In the wrong place.
    f"redis://{NOWHERE}/0?password={PASSWORD}",
    f"redis://{NOWHERE}/0?nonsense=1&password={PASSWORD}",
    f"redis://{NOWHERE}/0?{PASSWORD}",
    f"redis://{NOWHERE}/0?passwd={PASSWORD}",
    f"redis://{NOWHERE}/0#{PASSWORD}",
    f"unix://nowhere.sock?password={PASSWORD}",
    f"redis+cluster://{NOWHERE}?password={PASSWORD}",
    f"redis+sentinel://{NOWHERE}/name/0?password={PASSWORD}",
    f"redis://{PASSWORD}@{NOWHERE}",
    f"redis://{PASSWORD}:@{NOWHERE}",
    # A part is missing or superfluous.
    f":{PASSWORD}@{NOWHERE}",
    f"me:{PASSWORD}@{NOWHERE}",
    f"{PASSWORD}@{NOWHERE}",
    f"redis:/:{PASSWORD}@{NOWHERE}",
    f"redis:///:{PASSWORD}@{NOWHERE}",
    f"redis//:{PASSWORD}@{NOWHERE}",
    f"redis://:{PASSWORD}",
    f"redis://me:{PASSWORD}",
    f"redis://:{PASSWORD}@:1",
    f"redis://:{PASSWORD}@127.0.0.1:port/0",
    f"redis://:{PASSWORD}@127.0.0.1:99999/0",
    f"redis://:{PASSWORD}@[::1/0",
    f"redis://:{PASSWORD}@{NOWHERE}/database",
    f"redis://:{PASSWORD}@{NOWHERE}/0?nonsense=1",
    f"http://me:{PASSWORD}@{NOWHERE}/0",
    f"redis+other://me:{PASSWORD}@{NOWHERE}/0",
    f"URL=redis://me:{PASSWORD}@{NOWHERE}/0",
    f"redis+sentinel://me:{PASSWORD}@{NOWHERE}",
    f"redis+cluster://me:{PASSWORD}@{NOWHERE}/7",
    # Valid.
    f"redis://:{PASSWORD}@{NOWHERE}/0",
    f"redis://me:{PASSWORD}@{NOWHERE}/0",
    f"redis://me:%61{PASSWORD}%2Fx@{NOWHERE}/0",
    f"rediss://me:{PASSWORD}@{NOWHERE}/0",
    f"unix://me:{PASSWORD}@/nowhere.sock",
    f"redis+sentinel://me:{PASSWORD}@{NOWHERE},127.0.0.1:2/name/0",
    f"redis+cluster://me:{PASSWORD}@{NOWHERE}",
)


def contains_password(text: str) -> bool:
    """Whether a text contains the password, or a piece of six characters of it."""
    return any(PASSWORD[at : at + 6] in text for at in range(len(PASSWORD) - 5))
