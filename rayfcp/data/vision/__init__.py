"""Images of rows: sizes, places among the tokens, patches. Imported only if `data.processor` is set."""
