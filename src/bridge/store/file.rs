//! Finding, locking and loading a stream's file.
//!
//! The name is made of the worker's id so that no two ids have the same one, also where
//! file names have no case: all but `a-z`, `0-9`, `-` and `_` is written as `%` and two
//! digits, and a name that would be too long is cut and goes on with the id's SHA-256.
//!
//! A file is read twice: once to find the last mark behind which everything is whole, and
//! once to take what is before it. So memory holds one frame, whatever the file is.

use std::fmt;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufReader, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use tracing::warn;

use super::format::{self, Entry, Frames, IDENTITY_BYTES_MAX, Identity, put_frame};
use crate::bridge::copies::Copies;
use crate::bridge::mirror::Mirror;
use crate::bridge::stream::Kept;

/// Longest name of an id that is written out; file systems take 255 bytes with what is added.
const NAME_BYTES_MAX: usize = 160;

/// Bytes of a longer name that are kept before its digest.
const NAME_BYTES_KEPT: usize = 40;

/// Why a file cannot be kept.
#[derive(Debug)]
pub(in crate::bridge) enum OpenError {
    /// The system refused to do this to it.
    Io(&'static str, io::Error),
    /// Another process keeps it.
    Locked(PathBuf),
    /// Something else has its name.
    NoFile(PathBuf),
    /// The worker's id, its endpoint or its topic is longer than a file says.
    TooLong,
    /// A bug in this crate.
    Panicked,
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OpenError::Io(what, error) => write!(f, "cannot {what} its file: {error}"),
            OpenError::Locked(path) => write!(f, "another process keeps {}", path.display()),
            OpenError::NoFile(path) => write!(f, "{} is no plain file", path.display()),
            OpenError::TooLong => {
                write!(
                    f,
                    "the worker's id, endpoint or topic is longer than {IDENTITY_BYTES_MAX} bytes together"
                )
            }
            OpenError::Panicked => f.write_str("a bug; its message is above"),
        }
    }
}

/// A file's name without its ending.
pub(super) fn name_of(worker_id: &str) -> String {
    let mut name = String::new();
    for byte in worker_id.bytes() {
        match byte {
            b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' => name.push(char::from(byte)),
            _ => name.push_str(&format!("%{byte:02x}")),
        }
    }
    if name.len() > NAME_BYTES_MAX {
        name.truncate(NAME_BYTES_KEPT);
        // No name that is written out has this sign.
        name.push('~');
        Sha256::digest(worker_id).iter().for_each(|byte| name.push_str(&format!("{byte:02x}")));
    }
    name
}

/// A stream's file, locked, with the checksum and the place at which it goes on.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) log: Log,
    pub(super) path: PathBuf,
    pub(super) identity: Identity,
    /// Held for as long as the file is kept.
    _lock: File,
}

/// A file that is appended to.
#[derive(Debug)]
pub(super) struct Log {
    file: File,
    chain: u32,
    bytes: u64,
    waiting: Vec<u8>,
}

impl Log {
    /// Begins a file that is empty or made so.
    pub(super) fn begin(file: File, identity: &Identity) -> io::Result<Log> {
        let mut log = Log { file, chain: 0, bytes: 0, waiting: Vec::new() };
        log.empty(identity)?;
        Ok(log)
    }

    /// Leaves nothing but the head.
    pub(super) fn empty(&mut self, identity: &Identity) -> io::Result<()> {
        self.waiting.clear();
        self.file.set_len(0)?;
        self.file.seek(SeekFrom::Start(0))?;
        (self.chain, self.bytes) = (0, 0);
        self.push(identity.head());
        self.write()
    }

    /// Appends a body once it is written.
    pub(super) fn push(&mut self, body: &[u8]) {
        put_frame(&mut self.waiting, &mut self.chain, body);
    }

    /// Writes what was appended.
    pub(super) fn write(&mut self) -> io::Result<()> {
        self.file.write_all(&self.waiting)?;
        self.bytes += self.waiting.len() as u64;
        self.waiting.clear();
        Ok(())
    }

    /// Waits until the disk has it.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.file.sync_all()
    }

    /// Bytes written.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// A file for one owner's eyes, made anew with `truncate`.
pub(super) fn create(path: &Path, truncate: bool) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(truncate).mode(0o600);
    options.open(path)
}

/// The path of a file that takes another's place.
pub(super) fn fresh_path(path: &Path) -> PathBuf {
    path.with_extension("mirror-new")
}

/// Opens a stream's file and loads what it holds into the mirror and into `copies`, which are empty.
pub(super) fn open(
    directory: &Path,
    identity: &Identity,
    mirror: &Mirror,
    copies: Copies,
) -> Result<(Held, Option<Kept>), OpenError> {
    let io = |what| move |error| OpenError::Io(what, error);
    if identity.head().len() > IDENTITY_BYTES_MAX {
        return Err(OpenError::TooLong);
    }
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .map_err(io("make the directory of"))?;
    let name = name_of(&identity.worker_id);
    let path = directory.join(format!("{name}.mirror"));
    let lock_path = directory.join(format!("{name}.lock"));
    for path in [&path, &lock_path] {
        // Opening a pipe would wait, and a link may lead anywhere.
        match fs::symlink_metadata(path) {
            Ok(found) if !found.is_file() => return Err(OpenError::NoFile(path.clone())),
            _ => {}
        }
    }
    // A file of its own, as the other one is replaced. It is never removed: somebody may wait for it.
    let lock = create(&lock_path, false).map_err(io("lock"))?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Err(OpenError::Locked(path)),
        Err(TryLockError::Error(error)) => return Err(OpenError::Io("lock", error)),
    }
    // What a killed process was writing; that there is none is no error.
    let _ = fs::remove_file(fresh_path(&path));
    let mut file = create(&path, false).map_err(io("open"))?;
    let found = load(&mut file, identity, mirror, copies).unwrap_or_else(|why| {
        mirror.empty();
        warn!(worker = identity.worker_id, path = %path.display(), "begins anew what was kept: {why}");
        None
    });
    let opened = match found {
        Some((kept, end, chain)) => {
            let log = file.set_len(end).and_then(|()| file.seek(SeekFrom::Start(end)));
            log.map(|_| (Log { file, chain, bytes: end, waiting: Vec::new() }, Some(kept)))
        }
        None => Log::begin(file, identity).map(|log| (log, None)),
    };
    let (log, kept) = opened.map_err(|error| {
        mirror.empty();
        let _ = fs::remove_file(&path);
        OpenError::Io("write", error)
    })?;
    Ok((Held { log, path, identity: identity.clone(), _lock: lock }, kept))
}

/// What was loaded, and where the file goes on with which checksum.
type Loaded = (Kept, u64, u32);

/// Loads all up to the last mark; nothing from an empty file. What it has loaded before an error is in the mirror.
///
/// # Errors
/// Why nothing of the file counts.
fn load(
    file: &mut File,
    identity: &Identity,
    mirror: &Mirror,
    mut copies: Copies,
) -> Result<Option<Loaded>, String> {
    let unreadable = |error: io::Error| format!("it cannot be read: {error}");
    file.seek(SeekFrom::Start(0)).map_err(unreadable)?;
    let is_new = file.metadata().map_err(unreadable)?.len() == 0;
    let mut frames = Frames::new(BufReader::new(&mut *file));
    match frames.next().map_err(unreadable)? {
        Some(head) => identity.check(head)?,
        None if is_new => return Ok(None),
        None => return Err("its head is damaged".to_owned()),
    }
    let mut last = None;
    while let Some(body) = frames.next().map_err(unreadable)? {
        match format::entry(body) {
            Some(Entry::Mark(mark, incomplete)) => {
                last = Some((mark, incomplete, frames.offset, frames.chain));
            }
            Some(_) => {}
            None => break,
        }
    }
    let Some((mark, incomplete, end, chain)) = last else { return Ok(None) };
    file.seek(SeekFrom::Start(0)).map_err(unreadable)?;
    let mut frames = Frames::new(BufReader::new(&mut *file));
    while frames.offset < end {
        let body = frames.next().map_err(unreadable)?.ok_or("it changes while it is read")?;
        match format::entry(body) {
            Some(Entry::Actions(mut actions)) => {
                let clears = actions.iter().any(|action| action.hashes.is_empty());
                if mirror.apply(&mut actions) > 0 {
                    return Err("it holds more blocks than the mirror may".to_owned());
                }
                if clears {
                    // Blocks that only wait for this count as held.
                    mirror.clean_up();
                }
            }
            Some(Entry::Notes(notes)) => notes.into_iter().for_each(|note| copies.restore(note)),
            // The head is no entry, and was checked.
            Some(Entry::Mark(..)) | None => {}
        }
    }
    Ok(Some((Kept { mark, incomplete, copies }, end, chain)))
}
