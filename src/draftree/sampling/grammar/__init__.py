"""Grammars: schemas, regular expressions and their compilation into token masks."""
