//! A thread that gives memory back soon after it is free, and lays side by side what scans found apart.
//!
//! Applies put their clean-up off and do a share of it later, so nothing but the
//! memory of a quiet index and the time of later scans depends on this thread. It takes the index's lock for
//! one short step at a time.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::arena::Index;

/// Pause between two steps, longer than one: calls get most of the lock.
const PAUSE: Duration = Duration::from_millis(1);

/// Longest wait for work, and so how long the thread may outlive its server.
const PATIENCE: Duration = Duration::from_secs(1);

/// The running thread; it ends after this is dropped.
#[derive(Debug)]
pub(super) struct Maintenance {
    // Carries no data but itself, so `Relaxed` is enough.
    stop: Arc<AtomicBool>,
}

impl Maintenance {
    pub(super) fn start(index: Arc<Index>) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        thread::Builder::new().name("maintenance".to_owned()).spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                index.wait_for_maintenance(PATIENCE);
                while !stopped.load(Ordering::Relaxed) && index.maintain() {
                    thread::sleep(PAUSE);
                }
            }
        })?;
        Ok(Maintenance { stop })
    }
}

impl Drop for Maintenance {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
