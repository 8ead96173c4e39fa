"""Arguments and options that name handlers, `APP.HANDLER` or `APP` for all handlers of an app; and keys."""

from typing import Annotated

import typer

HandlerName = Annotated[str, typer.Argument(help="The handler.", metavar="APP.HANDLER")]
HandlerNames = Annotated[
    str | None, typer.Argument(help="Only this handler, or all of this app; default: all.", metavar="[APP[.HANDLER]]")
]
OnStream = Annotated[
    str | None, typer.Option("--stream", help="Only on this stream; default: all on which it has run.", metavar="NAME")
]
KEY_HELP = "The key; write bytes that are not text as \\xNN."
Key = Annotated[str, typer.Argument(help=KEY_HELP, metavar="KEY")]
