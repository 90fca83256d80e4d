"""From files to parameters: find the files, stream the tensors, rename them, account for every one."""
