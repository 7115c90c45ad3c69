"""Will it fit, what to use: the commands `plan` and `advise`. Standard library only; a Hub id alone needs a download."""
