"""The documentation as a static site: copies of the Markdown files, their navigation and the configuration."""
