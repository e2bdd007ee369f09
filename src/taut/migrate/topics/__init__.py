"""What becomes of a recipe's options, topic by topic: functions of a draft, which ``convert.py`` calls in order."""
