"""What is asked: texts, tasks, statistics and the reference models. Imports `engine`, never the other way round."""
