//! Files that are cut, damaged, compacted, shared and full, beside plain maps of what they are of.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::file::name_of;
use super::*;
use crate::arena::{Index, Keys, Tuning};
use crate::bridge::chunker::Chunker;
use crate::bridge::copies::Note;
use crate::bridge::mirror::Cursor;
use crate::pb::{ExternalKvActionType as Type, TierType as Tier};
use crate::settings::Settings;

/// A directory of one test, removed when it ends.
struct Place(PathBuf);

impl Place {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let (process, next) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        Place(std::env::temp_dir().join(format!("kv-indexer-store-{process}-{next}")))
    }

    fn config(&self, worker_id: &str) -> Config {
        let mut config =
            Config::read(&Settings::from_pairs([("KV_INDEXER_WORKER_ID", "w0")])).expect("settings");
        config.worker_id = worker_id.to_owned();
        config.mirror_dir = Some(self.0.clone());
        config
    }

    fn file(&self, worker_id: &str) -> PathBuf {
        self.0.join(format!("{}.mirror", name_of(worker_id)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn mirror(blocks_max: usize) -> Mirror {
    let index = Index::with_tuning(Tuning { keys: Keys::Fixed, ..Tuning::default() });
    Mirror::new(Arc::new(index), "w0", blocks_max)
}

/// Mask and tokens by tier and block.
type Held = BTreeMap<(i32, i64), (u32, u32)>;

fn take(held: &mut Held, action: &ExternalKvAction) {
    let at = |column: &[u32], place: usize| column.get(place).copied().unwrap_or(0);
    match action.r#type() {
        Type::ActionReport => {
            for (place, hash) in action.hashes.iter().enumerate() {
                let values = (at(&action.component_masks, place), at(&action.block_sizes, place));
                held.insert((action.tier, *hash), values);
            }
        }
        Type::ActionRevoke => {
            held.retain(|(tier, hash), _| *tier != action.tier || !action.hashes.contains(hash));
        }
        _ => held.retain(|(tier, _), _| *tier != action.tier),
    }
}

fn held(mirror: &Mirror) -> Held {
    let (mut held, mut cursor) = (Held::new(), Some(Cursor::START));
    while let Some(from) = cursor {
        let (page, next) = mirror.page(from);
        page.iter().for_each(|action| take(&mut held, action));
        cursor = next;
    }
    held
}

/// Copies as what they are noted as.
fn noted(copies: &Copies) -> BTreeSet<String> {
    copies.all_notes().map(|note| format!("{note:?}")).collect()
}

/// All that is kept at one moment.
type State = (u64, Option<Incomplete>, Held, BTreeSet<String>);

/// A stream's side: what is told to the keeper, and what must be found.
struct Writing {
    keeper: Keeper,
    mirror: Mirror,
    copies: Copies,
    truth: Held,
    sequence: u64,
}

impl Writing {
    fn start(config: &Config) -> Self {
        let mirror = mirror(1_000_000);
        let (keeper, kept) = Keeper::open(config, &mirror).expect("a file");
        assert!(kept.is_none(), "a new file");
        let mut copies = Copies::new(config.copies, false);
        copies.note_changes();
        Writing { keeper, mirror, copies, truth: Held::new(), sequence: 0 }
    }

    fn record(&mut self, incomplete: Option<Incomplete>, changes: impl FnOnce(&mut Chunker)) -> State {
        let mut chunker = Chunker::default();
        changes(&mut chunker);
        while let Some(mut actions) = chunker.pop() {
            self.keeper.begin();
            actions.iter().for_each(|action| take(&mut self.truth, action));
            assert_eq!(self.mirror.apply(&mut actions), 0);
            self.keeper.note(&actions);
        }
        self.sequence += 1;
        let mark = Mark { sequence: self.sequence, time: Some(self.sequence as f64), digest: 7 };
        let since = incomplete.map(|why| (SystemTime::UNIX_EPOCH + Duration::from_secs(9), why));
        assert!(!self.keeper.commit(Some(mark), since, &mut self.copies));
        (self.sequence, incomplete, self.truth.clone(), noted(&self.copies))
    }
}

/// What a file is found to hold; the mirror is empty before and after.
fn found(config: &Config, mirror: &Mirror) -> Option<State> {
    let copies = Copies::new(config.copies, false);
    let directory = config.mirror_dir.as_deref().expect("a directory");
    let (_, kept) = file::open(directory, &Identity::of(config), mirror, copies).expect("a file");
    let held = held(mirror);
    mirror.empty();
    let Some(kept) = kept else {
        assert!(held.is_empty(), "nothing is kept, and nothing loaded: {held:?}");
        return None;
    };
    if let Some((since, _)) = kept.incomplete {
        assert_eq!(since, SystemTime::UNIX_EPOCH + Duration::from_secs(9));
    }
    assert_eq!(kept.mark.time, Some(kept.mark.sequence as f64));
    Some((kept.mark.sequence, kept.incomplete.map(|(_, why)| why), held, noted(&kept.copies)))
}

const WAIT: Duration = Duration::from_secs(60);

/// A small file, and what was true at the end of each of its records.
async fn small(config: &Config) -> Vec<State> {
    let mut writing = Writing::start(config);
    let mut states = Vec::new();
    states.push(writing.record(None, |changes| changes.report(Tier::TierHbm, 0, 16, 1..6)));
    let note =
        |hash, count| Note::Copies { tier: Tier::TierHbm, group: Some(1), block_tokens: 16, hash, count };
    writing.copies.restore(Note::Seen(crate::bridge::event::Dialect::Vllm));
    for note in [note(1, 2), note(2, 1), Note::Kind(1, crate::bridge::event::GroupKind::Full)] {
        writing.copies.restore_noted(note);
    }
    states.push(writing.record(Some(Incomplete::Gap), |changes| {
        changes.report(Tier::TierDram, 3, 0, 6..8);
        changes.report(Tier::TierDram, 1, 8, 8..10);
        changes.revoke(Tier::TierHbm, 2..4);
    }));
    writing.copies.restore_noted(note(2, 0));
    states.push(writing.record(Some(Incomplete::Full), |_| {}));
    writing.copies.clear();
    states.push(writing.record(None, |changes| {
        changes.clear(&[Tier::TierHbm, Tier::TierDram]);
        changes.report(Tier::TierSsd, 0, 0, -2..0);
    }));
    writing.keeper.finish(WAIT).await;
    states
}

#[tokio::test]
async fn a_file_holds_what_was_true_at_its_last_mark() {
    let place = Place::new();
    let config = place.config("w0");
    let states = small(&config).await;
    assert_eq!(found(&config, &mirror(100)).as_ref(), states.last());
    // Reading it changes nothing.
    assert_eq!(found(&config, &mirror(100)).as_ref(), states.last());
}

#[tokio::test]
async fn a_cut_or_damaged_file_holds_what_was_true_once_or_nothing() {
    let place = Place::new();
    let config = place.config("w0");
    let states = small(&config).await;
    let path = place.file("w0");
    let whole = fs::read(&path).expect("a file");
    let mirror = mirror(100);
    let mut seen = BTreeSet::new();
    let mut check = |bytes: &[u8], what: &str| {
        fs::write(&path, bytes).expect("written");
        let found = found(&config, &mirror);
        let known = found.as_ref().is_none_or(|found| states.contains(found));
        assert!(known, "{what}: {found:?}");
        seen.insert(found.map_or(0, |found| found.0));
    };
    for length in 0..whole.len() {
        check(&whole[..length], &format!("{length} bytes"));
    }
    for at in 0..whole.len() {
        for flip in [0x01, 0x80, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] ^= flip;
            check(&bytes, &format!("byte {at} flipped by {flip:#x}"));
        }
    }
    // What followed another history is not taken for this one's.
    check(&[&whole[..], &whole[whole.len() / 2..]].concat(), "more behind the end");
    check(&[], "empty");
    // Each record's end was met, and nothing at all.
    assert_eq!(seen, (0..=states.len() as u64).collect());
}

#[tokio::test]
async fn a_log_goes_on_behind_a_torn_tail() {
    let place = Place::new();
    let config = place.config("w0");
    let states = small(&config).await;
    let path = place.file("w0");
    let whole = fs::read(&path).expect("a file");
    fs::write(&path, &whole[..whole.len() - 1]).expect("cut");
    let mirror = mirror(100);
    let (mut keeper, kept) = Keeper::open(&config, &mirror).expect("a file");
    let mut kept = kept.expect("all but the last record");
    assert_eq!(kept.mark.sequence, states[2].0);
    let mut actions = vec![ExternalKvAction {
        r#type: Type::ActionReport.into(),
        tier: Tier::TierHbm.into(),
        hashes: vec![77],
        ..ExternalKvAction::default()
    }];
    keeper.begin();
    mirror.apply(&mut actions);
    keeper.note(&actions);
    let mark = Mark { sequence: 50, time: Some(50.0), digest: 1 };
    assert!(!keeper.commit(Some(mark), None, &mut kept.copies));
    keeper.finish(WAIT).await;
    let truth = held(&mirror);
    mirror.empty();
    let found = found(&config, &mirror).expect("what was kept");
    assert_eq!((found.0, found.2), (50, truth));
}

#[tokio::test]
async fn a_log_that_grows_is_compacted_while_the_stream_goes_on() {
    let place = Place::new();
    let config = place.config("w0");
    let mut writing = Writing::start(&config);
    writing.mirror = writing.mirror.clone().with_page(7);
    let mut last = None;
    let mut seed = 9_u64;
    let mut random = |limit: i64| {
        seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (seed >> 33) as i64 % limit
    };
    for _ in 0..3_000 {
        let (kind, from, count) = (random(12), random(500), 1 + random(100));
        last = Some(writing.record(None, |changes| match kind {
            0 => changes.clear(&[Tier::TierHbm, Tier::TierDram, Tier::TierSsd]),
            1..=4 => changes.revoke(Tier::TierHbm, from..from + count),
            _ => changes.report(Tier::TierHbm, kind as u32 % 2, 16, from..from + count),
        }));
        // No faster than the disk by much, as then nothing would be left to compact.
        while writing.keeper.shared.queued_bytes.load(Ordering::Relaxed) > 64 * 1024 {
            std::thread::yield_now();
        }
    }
    writing.keeper.finish(WAIT).await;
    assert_eq!(found(&config, &mirror(1_000)), last);
    let bytes = fs::metadata(place.file("w0")).expect("a file").len();
    // Without it the records are past a million bytes.
    assert!(bytes < 3 * LOG_BYTES_MIN, "{bytes} bytes");
    assert!(!file::fresh_path(&place.file("w0")).exists());
}

#[tokio::test]
async fn an_emptied_file_holds_nothing() {
    let place = Place::new();
    let config = place.config("w0");
    let mut writing = Writing::start(&config);
    writing.record(None, |changes| changes.report(Tier::TierHbm, 0, 16, 0..9));
    assert!(!writing.keeper.commit(None, None, &mut writing.copies));
    writing.keeper.finish(WAIT).await;
    assert_eq!(found(&config, &mirror(100)), None);
}

#[tokio::test]
async fn a_file_that_does_not_fit_is_begun_anew() {
    let place = Place::new();
    let config = place.config("w0");
    small(&config).await;
    let whole = fs::read(place.file("w0")).expect("a file");
    // Too many blocks; another publisher, topic, rank, or way to read copies.
    assert_eq!(found(&config, &mirror(4)), None);
    let mut others = vec![config.clone(); 4];
    others[0].source.endpoint.push('1');
    others[1].source.topic.push('t');
    others[2].rank = Some(0);
    others[3].copies = crate::bridge::copies::Reading::Set;
    for other in &others {
        fs::write(place.file("w0"), &whole).expect("written");
        assert_eq!(found(other, &mirror(100)), None);
        assert_eq!(found(&config, &mirror(100)), None, "it was begun anew");
    }
    fs::write(place.file("w0"), &whole).expect("written");
    assert!(found(&config, &mirror(100)).is_some());
}

#[test]
fn names_are_safe_and_no_two_ids_share_one() {
    let long = "x".repeat(100_000);
    let ids = [
        "w0",
        "W0",
        "w/0",
        "w%2f0",
        "../w0",
        "..",
        ".",
        "w0\\0",
        "w0\u{0}",
        "é",
        " ",
        "w0~",
        &long,
        &long[1..],
        &"/".repeat(300),
        &format!("{}{}", "x".repeat(40), "~"),
    ]
    .map(str::to_owned);
    let mut names = BTreeSet::new();
    for id in &ids {
        let name = name_of(id);
        assert!(name.len() <= 200 && !name.is_empty(), "{name}");
        assert!(name.bytes().all(|byte| byte.is_ascii_graphic() && !b"/\\.:".contains(&byte)), "{name}");
        // File systems may not tell cases apart.
        assert!(names.insert(name.to_ascii_lowercase()), "{id:?} shares its name");
    }
}

#[tokio::test]
async fn a_file_has_one_owner_and_is_a_file() {
    let place = Place::new();
    let config = place.config("w0");
    let writing = Writing::start(&config);
    let second = Keeper::open(&config, &mirror(100)).expect_err("it is kept already");
    assert!(matches!(second, OpenError::Locked(_)), "{second}");
    assert!(place.file("w0").exists(), "the owner's file stays");
    writing.keeper.finish(WAIT).await;

    let other = place.config("w1");
    fs::create_dir(place.file("w1")).expect("a folder of that name");
    let error = Keeper::open(&other, &mirror(100)).expect_err("a folder");
    assert!(matches!(error, OpenError::NoFile(_)), "{error}");
}
