"""The command line: `saccade info | explain | verify | bench | demo`."""
