"""Tools that the policy may call: functions of the user, Python in the sandbox, MCP servers."""
