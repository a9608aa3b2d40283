"""One engine for prefill, decode and aggregated workers: scheduler, runners, sampling."""
