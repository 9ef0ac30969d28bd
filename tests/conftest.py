import sys
from pathlib import Path

# the oracle is shared by tests in several folders
sys.path.insert(0, str(Path(__file__).parent))
