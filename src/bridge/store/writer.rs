//! The thread that writes a stream's file.
//!
//! Records are appended as they come. When the log has grown to several times what it was
//! last written as, it is compacted while the stream goes on:
//!
//! 1. The next record brings all notes of copies as they are after it. They begin a second file.
//! 2. The mirror's pages are written to it, and between them the records that came meanwhile,
//!    without their marks, as they are to the first file with them.
//! 3. A page may hold changes whose record is still to come, and none that begins after it. So once
//!    the record that had begun when the last page was read is there, all is of one moment: a
//!    record names the value that it left, and whatever a page was early or late with, the records
//!    behind it set right. Now the mark follows, and the file is synced and renamed over the first.
//!
//! Until then the first file is whole, so a kill at any moment finds one of the two.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;

use tracing::{debug, warn};

use super::file::{Held, Log, create, fresh_path};
use super::format::{self, Bodies, MarkBody};
use super::{LOG_BYTES_MIN, Message, Shared};
use crate::bridge::mirror::{Cursor, Mirror};

/// Times that a log may be longer than the holdings that it began with.
const GROWTH_MAX: u64 = 3;

/// Bytes of a loaded placement, to guess what its holdings would take.
const PLACEMENT_BYTES: u64 = 8;

/// The thread's own state.
#[derive(Debug)]
pub(super) struct Writer {
    held: Held,
    mirror: Mirror,
    shared: Arc<Shared>,
    worker_id: String,
    /// Bytes of the file when it was last compact.
    compact_bytes: u64,
    /// Number of the last message written.
    done: u64,
}

/// Whether a second file can still become the first.
#[derive(Debug, PartialEq)]
enum Second {
    GoesOn(Option<MarkBody>),
    /// The stream has ended, or all was withdrawn.
    Void,
}

impl Writer {
    pub(super) fn new(held: Held, mirror: Mirror, shared: Arc<Shared>, worker_id: &str) -> Self {
        let compact_bytes = PLACEMENT_BYTES * mirror.placements();
        Writer { held, mirror, shared, worker_id: worker_id.to_owned(), compact_bytes, done: 0 }
    }

    /// Writes until the stream ends; on an error tells of it and removes the file.
    pub(super) fn run(mut self, messages: &Receiver<Message>) {
        let worker = self.worker_id.clone();
        match self.write_all(messages) {
            Ok(()) if !self.shared.failed.load(Ordering::SeqCst) => return,
            // The other end has told why.
            Ok(()) => {}
            Err(error) => warn!(worker, "the mirror is kept on disk no longer: {error}"),
        }
        self.shared.failed.store(true, Ordering::SeqCst);
        let _ = fs::remove_file(fresh_path(&self.held.path));
        if let Err(error) = fs::remove_file(&self.held.path) {
            // It is whole up to its last mark, which the publisher will have left behind.
            warn!(worker, "what was kept cannot be removed: {error}");
        }
    }

    fn write_all(&mut self, messages: &Receiver<Message>) -> io::Result<()> {
        while let Ok(message) = messages.recv() {
            if self.shared.failed.load(Ordering::SeqCst) {
                return Ok(());
            }
            let (mark, copies) = self.take(message, None)?;
            if let (Some(mark), Some(copies)) = (mark, copies) {
                self.compact(mark, &copies, messages)?;
            }
            if self.held.log.bytes() > LOG_BYTES_MIN + GROWTH_MAX * self.compact_bytes {
                self.shared.wants_copies.store(true, Ordering::Relaxed);
            }
        }
        self.held.log.sync()
    }

    /// Appends a message to the first file, and its changes to the second. Gives its mark and what it brings of copies.
    fn take(
        &mut self,
        message: Message,
        second: Option<&mut Log>,
    ) -> io::Result<(Option<MarkBody>, Option<Bodies>)> {
        self.shared.queued_bytes.fetch_sub(message.bytes(), Ordering::Relaxed);
        match message {
            Message::Record { number, bodies, mark, copies } => {
                bodies.iter().for_each(|body| self.held.log.push(body));
                self.held.log.push(&mark);
                self.held.log.write()?;
                if let Some(second) = second {
                    bodies.iter().for_each(|body| second.push(body));
                }
                self.done = number;
                Ok((Some(mark), copies))
            }
            Message::Empty { number } => {
                self.held.log.empty(&self.held.identity)?;
                self.compact_bytes = 0;
                self.done = number;
                Ok((None, None))
            }
        }
    }

    /// Writes what the worker holds to a second file and puts that in the place of the first.
    fn compact(&mut self, mark: MarkBody, copies: &Bodies, messages: &Receiver<Message>) -> io::Result<()> {
        let fresh = fresh_path(&self.held.path);
        let mut second = Log::begin(create(&fresh, true)?, &self.held.identity)?;
        copies.iter().for_each(|body| second.push(body));
        let Second::GoesOn(newer) = self.write_pages(&mut second, messages)? else {
            return fs::remove_file(&fresh);
        };
        second.push(&newer.unwrap_or(mark));
        second.write()?;
        second.sync()?;
        fs::rename(&fresh, &self.held.path)?;
        sync_directory(&self.held.path)?;
        debug!(worker = self.worker_id, from = self.held.log.bytes(), to = second.bytes(), "compacted");
        self.compact_bytes = second.bytes();
        self.held.log = second;
        Ok(())
    }

    /// Writes all pages, and the records that come until they are of one moment; the last one's mark.
    fn write_pages(&mut self, second: &mut Log, messages: &Receiver<Message>) -> io::Result<Second> {
        let (mut cursor, mut newest) = (Some(Cursor::START), None);
        while let Some(from) = cursor {
            let (page, next) = self.mirror.page(from);
            cursor = next;
            if !page.is_empty() {
                let mut body = Vec::new();
                format::put_actions(&mut body, &page);
                second.push(&body);
            }
            second.write()?;
            while let Ok(message) = messages.try_recv() {
                let (Some(mark), _) = self.take(message, Some(second))? else { return Ok(Second::Void) };
                newest = Some(mark);
            }
        }
        let begun = self.shared.begun.load(Ordering::SeqCst);
        while self.done < begun {
            let Ok(message) = messages.recv() else { return Ok(Second::Void) };
            let (Some(mark), _) = self.take(message, Some(second))? else { return Ok(Second::Void) };
            newest = Some(mark);
        }
        Ok(Second::GoesOn(newest))
    }
}

/// Waits until the disk knows a file by its new name.
fn sync_directory(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(directory) => File::open(directory)?.sync_all(),
        None => Ok(()),
    }
}
