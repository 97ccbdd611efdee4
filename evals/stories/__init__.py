"""The scenes of the generated word problems (evals/word_problems.py): each chains quantities to a story.

A scene takes a Story and calls `say`, `work` and `ask` in the order of the text. It may raise DrawAgainError, directly
or through a quantity that does not come out whole; the generator then draws anew. Phrases with many wordings are in
phrases.py, those of one scene stand in the scene: alternatives in one string, ` | ` between.
"""
