//! Writing a recording.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::Value;

use super::{FORMAT_KEY, FORMAT_VERSION, What};

/// A recording that grows.
pub(in crate::cli) struct Writer {
    out: GzEncoder<BufWriter<File>>,
}

impl Writer {
    /// Starts a file; one that exists is overwritten only if `replace`.
    pub(in crate::cli) fn create(path: &Path, replace: bool, about: &mut Value) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.write(true).create_new(!replace).create(replace).truncate(replace);
        let mut out = GzEncoder::new(BufWriter::new(options.open(path)?), Compression::fast());
        about[FORMAT_KEY] = FORMAT_VERSION.into();
        writeln!(out, "{about}")?;
        out.flush()?;
        Ok(Writer { out })
    }

    /// Appends what happened `at` this time since the start.
    pub(in crate::cli) fn append(&mut self, at: Duration, what: &What) -> io::Result<()> {
        let kind = match what {
            What::Connected => b'c',
            What::Disconnected => b'd',
            What::Message(_) => b'm',
        };
        self.out.write_all(&[kind])?;
        self.out.write_all(&u64::try_from(at.as_micros()).unwrap_or(u64::MAX).to_le_bytes())?;
        if let What::Message(frames) = what {
            let too_long = |_| io::Error::other("a message is longer than the format can say");
            self.out.write_all(&[u8::try_from(frames.len()).map_err(too_long)?])?;
            for frame in frames {
                self.out.write_all(&u32::try_from(frame.len()).map_err(too_long)?.to_le_bytes())?;
                self.out.write_all(frame)?;
            }
        }
        Ok(())
    }

    /// Brings all that was appended into the file, so that a recorder that is killed loses no more.
    pub(in crate::cli) fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    /// Ends the file.
    pub(in crate::cli) fn finish(self) -> io::Result<()> {
        self.out.finish()?.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
    }
}
