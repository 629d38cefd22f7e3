"""What users import from ``comlrl``, for editors and type checkers; it is loaded at first use."""

from comlrl.errors import UserError as UserError
from comlrl.trainers.launch.python_api import Run as Run
from comlrl.trainers.launch.python_api import evaluate as evaluate
from comlrl.trainers.launch.python_api import train as train
from comlrl.types import Domain as Domain
from comlrl.types import JointAction as JointAction
from comlrl.types import Reward as Reward
from comlrl.types import Score as Score
from comlrl.types import Task as Task
from comlrl.types import Transition as Transition
