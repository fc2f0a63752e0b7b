"""Who may call a server: API keys, the owners behind them, their scopes and quotas."""
