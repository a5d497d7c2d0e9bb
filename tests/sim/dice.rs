//! Chance that a seed fixes.

use std::ops::Range;
use std::time::Duration;

/// Draws the same for the same seed.
pub struct Dice(fastrand::Rng);

impl Dice {
    pub fn of(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    /// Dice of their own for a part that draws at its own pace.
    pub fn fork(&mut self) -> Self {
        Self(self.0.fork())
    }

    /// The same, without a draw: what else is drawn stays as it is.
    pub fn apart(&self) -> Self {
        Self(fastrand::Rng::with_seed(!self.0.get_seed()))
    }

    pub fn seed(&mut self) -> u64 {
        self.0.u64(..)
    }

    pub fn within(&mut self, range: Range<u64>) -> u64 {
        self.0.u64(range)
    }

    /// Whether something happens that does in `percent` of 100 cases.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.0.u64(0..100) < percent
    }

    pub fn millis(&mut self, range: Range<u64>) -> Duration {
        Duration::from_millis(self.within(range))
    }

    pub fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.0.usize(..of.len())].clone()
    }

    /// One of `of`, each as often as the weight beside it says.
    pub fn weighted<T: Clone>(&mut self, of: &[(u64, T)]) -> T {
        let mut draw = self.within(0..of.iter().map(|(weight, _)| weight).sum());
        for (weight, one) in of {
            match draw.checked_sub(*weight) {
                Some(rest) => draw = rest,
                None => return one.clone(),
            }
        }
        unreachable!("the draw is below the sum of the weights")
    }
}
