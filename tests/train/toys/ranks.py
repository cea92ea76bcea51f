"""A program for ranks: `several_runs` with the toys."""

from tests.support.several_runs import main
from tests.train.toys import register_loss, register_optimizer

if __name__ == "__main__":
    register_optimizer()
    register_loss()
    main()
