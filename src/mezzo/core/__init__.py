"""The pure core: number formats, policies, loss scales, records and verdicts. Imports no framework."""
