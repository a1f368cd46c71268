"""Text: sources and their documents, a model's own answers, token blocks, and the tokenise stage.

Read: config, sources, folders, files, rows. Written by the dense model: questions, answers,
writing, answering, answers_of_run, expected. Cut into blocks: packing, whole_chats, blocks,
overlap. The stage of a run that does all this: tokenise.
"""
