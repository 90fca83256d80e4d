"""What the vectors of colpali-engine were made of."""

from tests.multimodal.checkpoints import picture

QUERIES = ["what is it", "a cat on a mat"]
PAGES = [picture(1), picture(2, 60, 45)]
