//! A value read from files, and read again when they change.
//!
//! What is in force is swapped as a whole, so a reader takes no lock and never meets
//! half of a change. Files that cannot be used leave the value as it was; that is
//! told once for each content, so that a look every few seconds does not flood the
//! log. Of the files only a digest is remembered, as they may be secrets.

use std::fs::File;
use std::hash::{DefaultHasher, Hasher};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;

/// Largest file that is read, in bytes: far more than any chain of certificates.
const FILE_BYTES_MAX: u64 = 1024 * 1024;

/// A file of those asked for cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Unusable {
    /// Its place in the list.
    pub(super) file: usize,
    /// What is wrong, without its content.
    pub(super) why: String,
}

/// Makes a value of the files' contents.
type Make<T> = Box<dyn Fn(&[Vec<u8>]) -> Result<T, Unusable> + Send + Sync>;

/// A value and the files it comes from.
pub(super) struct Kept<T> {
    paths: Vec<PathBuf>,
    make: Make<T>,
    value: ArcSwap<T>,
    /// Digest of the contents last looked at, whether they could be used or not.
    seen: Mutex<u64>,
}

/// What a further look found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// Nothing new, or nothing that has not been told of.
    Same,
    /// Another value is in force.
    Renewed,
    /// The files changed and cannot be used; the old value stays.
    Unusable(Unusable),
}

impl<T> Kept<T> {
    pub(super) fn read(
        paths: Vec<PathBuf>,
        make: impl Fn(&[Vec<u8>]) -> Result<T, Unusable> + Send + Sync + 'static,
    ) -> Result<Self, Unusable> {
        let contents = contents(&paths)?;
        let value = ArcSwap::from_pointee(make(&contents)?);
        Ok(Kept { paths, make: Box::new(make), value, seen: Mutex::new(digest(&contents)) })
    }

    /// Runs `look` on the value in force.
    pub(super) fn with<R>(&self, look: impl FnOnce(&T) -> R) -> R {
        look(&self.value.load())
    }

    pub(super) fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// Looks at the files again.
    pub(super) fn look_again(&self) -> Look {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let contents = contents(&self.paths);
        // A file that is missing for a moment has a digest too: it is told of once.
        let now =
            contents.as_ref().map_or_else(|missing| digest(&[missing.why.clone().into()]), |all| digest(all));
        if std::mem::replace(&mut *seen, now) == now {
            return Look::Same;
        }
        match contents.and_then(|contents| (self.make)(&contents)) {
            Ok(value) => {
                self.value.store(Arc::new(value));
                Look::Renewed
            }
            Err(unusable) => Look::Unusable(unusable),
        }
    }

    /// Looks at the files again and logs what came of it, of `what`.
    pub(super) fn look_and_tell(&self, what: &str) {
        match self.look_again() {
            Look::Same => {}
            Look::Renewed => tracing::info!("{what} renewed"),
            Look::Unusable(Unusable { file, why }) => {
                let path = self.paths.get(file).map(PathBuf::as_path).unwrap_or(Path::new("")).display();
                tracing::warn!("{what} cannot be renewed, the old ones stay: {path}: {why}");
            }
        }
    }
}

// By hand, so that no value is ever shown: it may be a secret.
impl<T> std::fmt::Debug for Kept<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kept").field("paths", &self.paths).finish_non_exhaustive()
    }
}

fn contents(paths: &[PathBuf]) -> Result<Vec<Vec<u8>>, Unusable> {
    let read = |(file, path): (usize, &PathBuf)| {
        content(path).map_err(|error| Unusable { file, why: error.to_string() })
    };
    paths.iter().enumerate().map(read).collect()
}

fn content(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let length = File::open(path)?.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if length as u64 > FILE_BYTES_MAX {
        return Err(std::io::Error::other("larger than 1 MiB"));
    }
    Ok(bytes)
}

fn digest(contents: &[Vec<u8>]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for content in contents {
        hasher.write_usize(content.len());
        hasher.write(content);
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that is removed when its test ends.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("kv-indexer-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).expect("a folder");
            Folder(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn number(contents: &[Vec<u8>]) -> Result<u32, Unusable> {
        let text = std::str::from_utf8(&contents[0]).unwrap_or_default();
        text.trim().parse().map_err(|_| Unusable { file: 0, why: "no number".to_owned() })
    }

    #[test]
    fn a_change_is_taken_and_a_bad_one_told_of_once() {
        let folder = Folder::new("kept");
        let path = folder.0.join("number");
        std::fs::write(&path, "1").expect("written");
        let kept = Kept::read(vec![path.clone()], number).expect("a number");
        assert_eq!((kept.with(|number| *number), kept.look_again()), (1, Look::Same));
        std::fs::write(&path, "2\n").expect("written");
        assert_eq!(
            (kept.look_again(), kept.with(|number| *number), kept.look_again()),
            (Look::Renewed, 2, Look::Same)
        );
        std::fs::write(&path, "two").expect("written");
        assert_eq!(kept.look_again(), Look::Unusable(Unusable { file: 0, why: "no number".to_owned() }));
        assert_eq!((kept.look_again(), kept.with(|number| *number)), (Look::Same, 2));
        std::fs::remove_file(&path).expect("removed");
        assert!(matches!(kept.look_again(), Look::Unusable(_)));
        assert_eq!((kept.look_again(), kept.with(|number| *number)), (Look::Same, 2));
        std::fs::write(&path, "3").expect("written");
        assert_eq!((kept.look_again(), kept.with(|number| *number)), (Look::Renewed, 3));
    }

    #[test]
    fn a_file_that_is_not_there_or_too_large_is_an_error() {
        let folder = Folder::new("kept-large");
        let missing = Kept::read(vec![folder.0.join("missing")], number);
        assert_eq!(missing.err().map(|unusable| unusable.file), Some(0));
        let path = folder.0.join("large");
        std::fs::write(&path, vec![b'1'; FILE_BYTES_MAX as usize + 1]).expect("written");
        let large = Kept::read(vec![path], number).expect_err("too large");
        assert!(large.why.contains("1 MiB"), "{large:?}");
    }
}
