"""The real pipeline: stages, rehearsal, workers and their launch. Nothing here decides anything."""
