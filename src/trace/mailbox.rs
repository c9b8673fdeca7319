//! The way of events from the engine's thread to the writer's: a bounded queue that wakes nobody while there is time.
//!
//! Waking a thread for every step costs the engine a system call and, where its own threads fill the machine, its
//! core. So the writer looks by itself every [`LOOK_INTERVAL`], and is woken only when half the room is taken or
//! something is [urgent](Mailbox::post_urgent).

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long an event may lie before the receiver looks.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// The receiver has gone; nothing is taken any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Closed;

#[derive(Debug)]
struct State<T> {
    waiting: Vec<T>,
    urgent: bool,
    closed: bool,
}

/// A queue of at most `room` items for one receiver.
#[derive(Debug)]
pub(super) struct Mailbox<T> {
    state: Mutex<State<T>>,
    room: usize,
    /// Wakes the receiver.
    look: Condvar,
    /// Wakes senders that wait for room.
    taken: Condvar,
}

impl<T> Mailbox<T> {
    /// An empty one.
    pub(super) fn new(room: usize) -> Self {
        let state = Mutex::new(State { waiting: Vec::new(), urgent: false, closed: false });
        Self { state, room: room.max(1), look: Condvar::new(), taken: Condvar::new() }
    }

    /// Nothing panics while it holds the lock, so the state is whole whatever happened elsewhere.
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts an item in, after waiting for room where there is none; gives the time waited, if any.
    ///
    /// # Errors
    /// [`Closed`] when the receiver has gone.
    pub(super) fn post(&self, item: T) -> Result<Option<Duration>, Closed> {
        let mut state = self.lock();
        let mut begin = None;
        while state.waiting.len() >= self.room && !state.closed {
            begin.get_or_insert_with(Instant::now);
            self.look.notify_one();
            state = self.taken.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.closed {
            return Err(Closed);
        }
        state.waiting.push(item);
        if state.waiting.len() * 2 >= self.room {
            self.look.notify_one();
        }
        Ok(begin.map(|begin| begin.elapsed()))
    }

    /// Puts an item in if there is room and a receiver.
    pub(super) fn offer(&self, item: T) {
        let mut state = self.lock();
        if !state.closed && state.waiting.len() < self.room {
            state.waiting.push(item);
        }
    }

    /// Puts an item in, room or not, and wakes the receiver.
    ///
    /// # Errors
    /// [`Closed`] when the receiver has gone.
    pub(super) fn post_urgent(&self, item: T) -> Result<(), Closed> {
        let mut state = self.lock();
        if state.closed {
            return Err(Closed);
        }
        state.waiting.push(item);
        state.urgent = true;
        self.look.notify_one();
        Ok(())
    }

    /// Moves everything that waits to the end of `into`, in order, after at most [`LOOK_INTERVAL`] or until `due`.
    pub(super) fn collect(&self, into: &mut Vec<T>, due: Option<Instant>) {
        let until =
            |due: Option<Instant>| due.map_or(LOOK_INTERVAL, |due| due.saturating_duration_since(Instant::now()).min(LOOK_INTERVAL));
        let mut state = self.lock();
        if !state.urgent && state.waiting.len() * 2 < self.room {
            state = self.look.wait_timeout(state, until(due)).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.urgent = false;
        into.append(&mut state.waiting);
        self.taken.notify_all();
    }

    /// Closes the box when it is dropped, however the receiver ends.
    pub(super) fn receiving(&self) -> Receiving<'_, T> {
        Receiving(self)
    }

    /// Says that the receiver has gone. What waits is dropped.
    fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.waiting.clear();
        self.taken.notify_all();
    }
}

/// See [`Mailbox::receiving`].
#[derive(Debug)]
pub(super) struct Receiving<'a, T>(&'a Mailbox<T>);

impl<T> Drop for Receiving<'_, T> {
    fn drop(&mut self) {
        self.0.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_arrives_once_and_in_order_through_little_room() {
        let mailbox = Mailbox::new(3);
        let mut got = Vec::new();
        std::thread::scope(|scope| {
            scope.spawn(|| (0..500).for_each(|i| assert!(mailbox.post(i).is_ok())));
            while got.len() < 500 {
                mailbox.collect(&mut got, None);
            }
        });
        assert_eq!(got, (0..500).collect::<Vec<_>>());
    }

    #[test]
    fn a_full_box_takes_no_offer_and_something_urgent() {
        let mailbox = Mailbox::new(1);
        assert_eq!(mailbox.post(1), Ok(None));
        mailbox.offer(2);
        mailbox.post_urgent(3).unwrap();
        let mut got = Vec::new();
        mailbox.collect(&mut got, Some(Instant::now()));
        assert_eq!(got, [1, 3]);
        mailbox.offer(4);
        mailbox.collect(&mut got, Some(Instant::now()));
        assert_eq!(got, [1, 3, 4]);
    }

    #[test]
    fn a_sender_that_waits_is_told_when_the_receiver_goes() {
        let mailbox = Mailbox::new(1);
        mailbox.post(1).unwrap();
        std::thread::scope(|scope| {
            let sender = scope.spawn(|| mailbox.post(2));
            let receiving = mailbox.receiving();
            std::thread::sleep(Duration::from_millis(5));
            drop(receiving);
            assert_eq!(sender.join().unwrap(), Err(Closed));
        });
        assert_eq!((mailbox.post(3), mailbox.post_urgent(4)), (Err(Closed), Err(Closed)));
    }
}
