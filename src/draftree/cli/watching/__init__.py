"""Parts of `draftree watch`: the connection to a server, what it reports, and the view."""
