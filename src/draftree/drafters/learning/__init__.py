"""Learning from verified texts while serving: tables of tokens, corrections of heads, and their files."""
