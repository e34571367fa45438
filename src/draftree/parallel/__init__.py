"""Models whose passes are divided among several processes: tensor parallel, pipeline parallel, and native kernels."""
