//! Reading a recording, in either form.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use flate2::read::MultiGzDecoder;
use indicatif::ProgressBar;
use serde_json::Value;

use super::{Entry, FORMAT_KEY, FORMAT_VERSION, What};
use crate::bridge::zmtp::wire::{FRAMES_MAX, MESSAGE_BYTES_MAX};
use crate::cli::{Failure, output};

/// Longest first line.
const FIRST_LINE_BYTES_MAX: usize = 64 * 1024;

/// Longest line of a capture: a message in hex, and what is said of it.
const LINE_BYTES_MAX: usize = 2 * MESSAGE_BYTES_MAX + FIRST_LINE_BYTES_MAX;

/// What a gzip file begins with.
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// A recording that is being read: what happened, in order.
///
/// An error is the last item.
pub(in crate::cli) struct Recording {
    path: PathBuf,
    source: Box<dyn BufRead>,
    form: Form,
    /// Entries read so far.
    read: u64,
    ended: bool,
    /// Bytes of the file that were read.
    pub(in crate::cli) progress: ProgressBar,
}

enum Form {
    /// Own records, all of this stream.
    Records(Arc<str>),
    /// Lines of JSON.
    Lines {
        /// Streams that have had a message.
        seen: BTreeSet<Arc<str>>,
        /// The message whose stream was told to be connected first.
        waiting: Option<Entry>,
    },
}

/// Why a recording cannot be read on.
enum ReadError {
    Io(io::Error),
    /// It ends in the middle of something.
    Cut,
    /// It holds what no recording does.
    Malformed(&'static str),
}

impl From<io::Error> for ReadError {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::UnexpectedEof { ReadError::Cut } else { ReadError::Io(error) }
    }
}

impl Recording {
    /// Opens a file and reads what it says of itself.
    pub(in crate::cli) fn open(path: &Path) -> Result<Self, Failure> {
        let failed = |error: &dyn std::fmt::Display| Failure::Input(format!("{}: {error}", path.display()));
        let file = File::open(path).map_err(|error| failed(&error))?;
        let length = file.metadata().map_err(|error| failed(&error))?.len();
        let progress = output::progress(length, "read");
        let mut raw = BufReader::new(progress.wrap_read(file));
        let is_gzip = raw.fill_buf().map_err(|error| failed(&error))?.starts_with(&GZIP);
        let mut source: Box<dyn BufRead> =
            if is_gzip { Box::new(BufReader::new(MultiGzDecoder::new(raw))) } else { Box::new(raw) };
        let about = match line(&mut *source, FIRST_LINE_BYTES_MAX) {
            Ok(Some(line)) => serde_json::from_slice::<Value>(&line).unwrap_or_default(),
            Ok(None) | Err(_) => Value::Null,
        };
        let Some(about) = about.as_object() else {
            return Err(failed(&"no recording: its first line is no JSON object"));
        };
        let form = match about.get(FORMAT_KEY) {
            None => Form::Lines { seen: BTreeSet::new(), waiting: None },
            Some(version) if version.as_u64() == Some(FORMAT_VERSION) => {
                Form::Records(about.get("stream").and_then(Value::as_str).unwrap_or_default().into())
            }
            Some(version) => {
                return Err(failed(&format!(
                    "a recording of version {version}, which this build cannot read"
                )));
            }
        };
        Ok(Recording { path: path.to_owned(), source, form, read: 0, ended: false, progress })
    }

    fn entry(&mut self) -> Result<Option<Entry>, ReadError> {
        match &mut self.form {
            Form::Records(stream) => record(&mut *self.source, stream),
            Form::Lines { seen, waiting } => {
                if let Some(entry) = waiting.take() {
                    return Ok(Some(entry));
                }
                while let Some(line) = line(&mut *self.source, LINE_BYTES_MAX)? {
                    let Some(entry) = captured(&line)? else { continue };
                    if !seen.insert(Arc::clone(&entry.stream)) {
                        return Ok(Some(entry));
                    }
                    let connected = Entry { what: What::Connected, ..entry.clone() };
                    *waiting = Some(entry);
                    return Ok(Some(connected));
                }
                Ok(None)
            }
        }
    }
}

impl Iterator for Recording {
    type Item = Result<Entry, Failure>;

    fn next(&mut self) -> Option<Result<Entry, Failure>> {
        if self.ended {
            return None;
        }
        let entry = self.entry();
        self.ended = !matches!(entry, Ok(Some(_)));
        let what = match entry {
            Ok(entry) => {
                self.read += u64::from(entry.is_some());
                return entry.map(Ok);
            }
            Err(ReadError::Io(error)) => error.to_string(),
            Err(ReadError::Cut) => "it is cut off".to_owned(),
            Err(ReadError::Malformed(what)) => what.to_owned(),
        };
        Some(Err(Failure::Input(format!("{}: after {} entries: {what}", self.path.display(), self.read))))
    }
}

/// The next record of an own recording; `None` at its end.
fn record(source: &mut dyn BufRead, stream: &Arc<str>) -> Result<Option<Entry>, ReadError> {
    if source.fill_buf()?.is_empty() {
        return Ok(None);
    }
    let mut head = [0; 9];
    source.read_exact(&mut head)?;
    let [kind, at @ ..] = head;
    let what = match kind {
        b'c' => What::Connected,
        b'd' => What::Disconnected,
        b'm' => What::Message(frames(source)?),
        _ => return Err(ReadError::Malformed("a record of no known kind")),
    };
    Ok(Some(Entry { stream: Arc::clone(stream), at: Duration::from_micros(u64::from_le_bytes(at)), what }))
}

fn frames(source: &mut dyn BufRead) -> Result<Vec<Bytes>, ReadError> {
    let mut count = [0];
    source.read_exact(&mut count)?;
    let mut left = MESSAGE_BYTES_MAX as u64;
    let mut frames = Vec::new();
    if usize::from(count[0]) > FRAMES_MAX {
        return Err(ReadError::Malformed("a message of too many frames"));
    }
    for _ in 0..count[0] {
        let mut length = [0; 4];
        source.read_exact(&mut length)?;
        let length = u64::from(u32::from_le_bytes(length));
        left = left.checked_sub(length).ok_or(ReadError::Malformed("a message that is too long"))?;
        // Grows with what is there, whatever the length says.
        let mut frame = Vec::new();
        source.take(length).read_to_end(&mut frame)?;
        if (frame.len() as u64) < length {
            return Err(ReadError::Cut);
        }
        frames.push(frame.into());
    }
    Ok(frames)
}

/// The next line without its end; `None` at the end.
fn line(source: &mut dyn BufRead, bytes_max: usize) -> Result<Option<Vec<u8>>, ReadError> {
    let mut line = Vec::new();
    source.take(bytes_max as u64 + 1).read_until(b'\n', &mut line)?;
    if line.len() > bytes_max {
        return Err(ReadError::Malformed("a line that is too long"));
    }
    Ok((!line.is_empty()).then_some(line))
}

/// The entry of a capture's line; `None` of what no subscriber received.
fn captured(line: &[u8]) -> Result<Option<Entry>, ReadError> {
    let is_cut = !line.ends_with(b"\n");
    let message: Value = match serde_json::from_slice(line) {
        Ok(message) => message,
        Err(_) if is_cut => return Err(ReadError::Cut),
        Err(_) => return Err(ReadError::Malformed("a line that is no JSON")),
    };
    if message["via"] != "sub" {
        return Ok(None);
    }
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let stream = text(&message["stream"]).ok_or(ReadError::Malformed("a message of no stream"))?;
    let at = message["t"].as_f64().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let frames = message["frames"].as_array().map(Vec::as_slice).unwrap_or_default();
    let frames = frames.iter().map(|frame| frame.as_str().and_then(unhex));
    let frames: Option<Vec<Bytes>> = frames.collect();
    match frames.zip(at).filter(|(frames, _)| !frames.is_empty() && frames.len() <= FRAMES_MAX) {
        Some((frames, at)) => Ok(Some(Entry { stream: stream.into(), at, what: What::Message(frames) })),
        None => Err(ReadError::Malformed("a message without a time or frames in hex")),
    }
}

fn unhex(text: &str) -> Option<Bytes> {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let bytes = pairs.iter().map(|[high, low]| Some((digit(*high)? << 4 | digit(*low)?) as u8));
    bytes.collect::<Option<Vec<u8>>>().filter(|_| rest.is_empty()).map(Bytes::from)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;
    use serde_json::json;

    use super::super::Writer;
    use super::*;

    /// A path of this test alone; the file goes with it.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            Scratch(std::env::temp_dir().join(format!("kv-indexer-{name}-{}", std::process::id())))
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    fn read(path: &Path) -> (Vec<Entry>, Option<String>) {
        let mut entries = Vec::new();
        let recording = match Recording::open(path) {
            Ok(recording) => recording,
            Err(failure) => return (entries, Some(failure.to_string())),
        };
        for entry in recording {
            match entry {
                Ok(entry) => entries.push(entry),
                Err(failure) => return (entries, Some(failure.to_string())),
            }
        }
        (entries, None)
    }

    fn entries() -> Vec<Entry> {
        let message = |frames: &[&'static [u8]]| {
            What::Message(frames.iter().map(|frame| Bytes::from_static(frame)).collect())
        };
        let all = [
            What::Connected,
            message(&[b"topic", &[0, 0, 0, 0, 0, 0, 0, 1], b"payload"]),
            message(&[]),
            message(&[b""]),
            What::Disconnected,
        ];
        let at = |place: usize| Duration::from_micros(place as u64 * 1_000_003);
        all.into_iter().enumerate().map(|(n, what)| Entry { stream: "w0".into(), at: at(n), what }).collect()
    }

    fn write(path: &Path) {
        let mut writer = Writer::create(path, false, &mut json!({"stream": "w0"})).expect("a file");
        for entry in entries() {
            writer.append(entry.at, &entry.what).expect("written");
        }
        writer.finish().expect("finished");
    }

    #[test]
    fn what_is_written_is_read_and_a_file_is_not_overwritten_unasked() {
        let scratch = Scratch::new("round-trip");
        write(&scratch.0);
        assert_eq!(read(&scratch.0), (entries(), None));
        assert!(Writer::create(&scratch.0, false, &mut json!({})).is_err());
        Writer::create(&scratch.0, true, &mut json!({})).expect("replaced").finish().expect("finished");
        assert_eq!(read(&scratch.0), (Vec::new(), None));
    }

    #[test]
    fn a_file_that_is_cut_off_is_read_up_to_there() {
        let scratch = Scratch::new("cut");
        write(&scratch.0);
        let whole = std::fs::read(&scratch.0).expect("a file");
        for length in 0..whole.len() {
            std::fs::write(&scratch.0, &whole[..length]).expect("written");
            let (found, failure) = read(&scratch.0);
            assert!(entries().starts_with(&found), "{length} bytes");
            assert!(failure.is_some(), "{length} of {} bytes are not cut off", whole.len());
        }
    }

    #[test]
    fn hostile_files_are_refused() {
        let scratch = Scratch::new("hostile");
        let own = br#"{"kv-indexer-recording":1}"#;
        let line = |line: &str| [b"{}\n", line.as_bytes(), b"\n"].concat();
        for (bytes, expected) in [
            (b"".to_vec(), "no recording"),
            (b"\x1f\x8b".to_vec(), "no recording"),
            (b"PK\x03\x04".to_vec(), "no recording"),
            (vec![b'{'; 10_000_000], "no recording"),
            (br#"{"kv-indexer-recording":2}"#.to_vec(), "version 2"),
            ([own, &b"\nx12345678"[..]].concat(), "no known kind"),
            ([own, &b"\nm12345678\xff"[..]].concat(), "too many frames"),
            ([own, &b"\nm12345678\x01\xff\xff\xff\xff"[..]].concat(), "too long"),
            ([own, &b"\nm12345678\x01\x00\x00\x00\x01abc"[..]].concat(), "cut off"),
            (line("x"), "no JSON"),
            (line(r#"{"via":"sub","t":0,"frames":["00"]}"#), "no stream"),
            (line(r#"{"via":"sub","stream":"w","t":0,"frames":["0"]}"#), "frames in hex"),
            (line(r#"{"via":"sub","stream":"w","t":-1,"frames":["00"]}"#), "without a time"),
            (line(r#"{"via":"sub","stream":"w","t":1e300,"frames":["00"]}"#), "without a time"),
            (line(r#"{"via":"sub","stream":"w","t":0,"frames":[]}"#), "frames in hex"),
        ] {
            for packed in [false, true] {
                let bytes = if packed {
                    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
                    gzip.write_all(&bytes).expect("written");
                    gzip.finish().expect("finished")
                } else {
                    bytes.clone()
                };
                std::fs::write(&scratch.0, bytes).expect("written");
                let (found, failure) = read(&scratch.0);
                let failure = failure.unwrap_or_else(|| panic!("{expected}: {found:?}"));
                assert!(failure.contains(expected), "{failure}, not {expected}");
                assert!(found.is_empty());
            }
        }
    }

    #[test]
    fn a_capture_tells_each_stream_once_that_it_is_connected() {
        let scratch = Scratch::new("capture");
        let lines = [
            r#"{"engine":"sglang"}"#,
            r#"{"stream":"a","via":"sub","t":0.5,"frames":["6b","00Ff"]}"#,
            r#"{"stream":"a","via":"replay-answer","t":0.6,"frames":["00"]}"#,
            r#"{"stream":"b","via":"sub","t":1,"frames":["00"]}"#,
            r#"{"stream":"a","via":"sub","t":2,"frames":["01"]}"#,
        ];
        std::fs::write(&scratch.0, lines.join("\n") + "\n").expect("written");
        let (entries, failure) = read(&scratch.0);
        assert_eq!(failure, None);
        let told: Vec<_> = entries
            .iter()
            .map(|entry| (&*entry.stream, entry.at.as_millis(), entry.what != What::Connected))
            .collect();
        assert_eq!(
            told,
            [("a", 500, false), ("a", 500, true), ("b", 1000, false), ("b", 1000, true), ("a", 2000, true)]
        );
        let What::Message(frames) = &entries[1].what else { panic!("a message") };
        assert_eq!(frames[..], [Bytes::from_static(b"k"), Bytes::from_static(&[0, 0xff])]);
    }
}
