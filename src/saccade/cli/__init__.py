"""The command line: `saccade info | cache | explain | verify | bench | demo`."""
