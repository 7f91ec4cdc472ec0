"""What the commands share: flags from fields, files and directories of a run, a clean stop, figures for people."""
