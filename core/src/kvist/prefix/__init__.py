"""The prefix index: which token runs are cached, in which pages, and which of them may go first."""
