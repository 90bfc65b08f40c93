"""DeepSeek-V4's attention in Triton: importing a module needs triton, and chooses its interpreter or its compiler."""
