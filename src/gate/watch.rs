//! A value that others wait to see change. Those who wait are woken in the order in which they came.
//!
//! It is what the gate needs of `tokio::sync::watch`, which wakes in an order of chance: then two requests that wait for
//! the same thing would take turns differently each time, and no simulation could be played again.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// Changes the value. Dropped, it ends every wait.
pub(super) struct Sender<T>(Arc<Channel<T>>);

/// Sees the value change.
pub(super) struct Receiver<T>(Arc<Channel<T>>);

/// The sender is gone, and the value never became what was waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gone;

struct Channel<T> {
    state: Mutex<State<T>>,
    changed: Notify,
}

struct State<T> {
    value: T,
    is_gone: bool,
}

impl<T> Sender<T> {
    pub(super) fn new(value: T) -> Self {
        let state = Mutex::new(State { value, is_gone: false });
        Self(Arc::new(Channel { state, changed: Notify::new() }))
    }

    pub(super) fn subscribe(&self) -> Receiver<T> {
        Receiver(Arc::clone(&self.0))
    }

    /// Puts another value in the place of this one, and wakes those who wait.
    pub(super) fn send_replace(&self, value: T) -> T {
        let before = std::mem::replace(&mut self.0.lock().value, value);
        self.0.changed.notify_waiters();
        before
    }

    /// Looks at the value.
    pub(super) fn with<R>(&self, look: impl FnOnce(&T) -> R) -> R {
        look(&self.0.lock().value)
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        self.0.lock().is_gone = true;
        self.0.changed.notify_waiters();
    }
}

impl<T: Clone> Receiver<T> {
    /// The value as it is.
    pub(super) fn get(&self) -> T {
        self.0.lock().value.clone()
    }

    /// Waits until `is_it` holds of the value, and returns that. The last value counts, even if its sender is gone.
    pub(super) async fn wait_for(&mut self, mut is_it: impl FnMut(&T) -> bool) -> Result<T, Gone> {
        loop {
            // From its creation on it is woken, also by what changes before it waits.
            let changed = self.0.changed.notified();
            {
                let state = self.0.lock();
                if is_it(&state.value) {
                    return Ok(state.value.clone());
                }
                if state.is_gone {
                    return Err(Gone);
                }
            }
            changed.await;
        }
    }
}

impl<T> Channel<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // Nothing that is done under it can leave the value half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_first_to_wait_is_the_first_to_wake() {
        let sender = Sender::new(0);
        let order = Arc::new(Mutex::new(Vec::new()));
        let waiters: Vec<_> = (0..20)
            .map(|number| {
                let (mut receiver, order) = (sender.subscribe(), Arc::clone(&order));
                tokio::spawn(async move {
                    receiver.wait_for(|value| *value == 2).await.unwrap();
                    order.lock().unwrap().push(number);
                })
            })
            .collect();
        for value in 1..=2 {
            tokio::task::yield_now().await;
            assert_eq!(sender.send_replace(value), value - 1);
        }
        for waiter in waiters {
            waiter.await.unwrap();
        }
        assert_eq!(*order.lock().unwrap(), (0..20).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn the_last_value_counts_though_its_sender_is_gone() {
        let sender = Sender::new(1);
        let (mut one, mut other) = (sender.subscribe(), sender.subscribe());
        let waits = tokio::spawn(async move { one.wait_for(|value| *value == 3).await });
        tokio::task::yield_now().await;
        sender.send_replace(2);
        assert_eq!((sender.with(|value| *value), other.get()), (2, 2));
        drop(sender);
        assert_eq!(other.wait_for(|value| *value == 2).await, Ok(2));
        assert_eq!(waits.await.unwrap(), Err(Gone));
    }
}
