"""Check rules, one file per subject; `rule.rules` imports every file of this folder and lists what it registers."""
