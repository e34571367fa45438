"""From texts and updates to the JSON of responses."""
