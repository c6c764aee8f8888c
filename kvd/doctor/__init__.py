"""kvd doctor: checks of the machine, the settings and the running kvd, with remedies."""
