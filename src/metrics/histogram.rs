//! A histogram of fixed bounds.
//!
//! A value costs a search in at most 18 bounds and two additions. The total
//! is the sum of the buckets, so a reading is consistent in itself whatever is
//! recorded meanwhile; only the sum of values may be a few values ahead.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

/// What one unit of a histogram's values is when it is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// Values are nanoseconds and shown as seconds.
    Seconds,
    /// Values are counts and shown as they are.
    Count,
}

impl Scale {
    fn shown(self, value: u64) -> f64 {
        match self {
            // A division rounds once, so that bounds print as they were meant.
            Scale::Seconds => value as f64 / 1e9,
            Scale::Count => value as f64,
        }
    }
}

/// Counts values by the smallest bound that is not below them.
#[derive(Debug)]
pub struct Histogram {
    scale: Scale,
    bounds: &'static [u64],
    /// One for each bound, and one for what is past the last.
    counts: Box<[AtomicU64]>,
    sum: AtomicU64,
}

impl Histogram {
    /// An empty histogram; `bounds` ascend.
    pub fn new(scale: Scale, bounds: &'static [u64]) -> Self {
        debug_assert!(bounds.is_sorted(), "bounds ascend");
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Histogram { scale, bounds, counts, sum: AtomicU64::new(0) }
    }

    /// Records a value, in the unit of the bounds.
    #[inline]
    pub fn record(&self, value: u64) {
        let bucket = self.bounds.partition_point(|bound| *bound < value);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(value, Ordering::Relaxed);
    }

    /// Records a duration, in a histogram of nanoseconds.
    #[inline]
    pub fn record_time(&self, time: Duration) {
        self.record(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    /// What has been recorded so far.
    pub fn read(&self) -> Reading {
        let counts = self.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        Reading { scale: self.scale, bounds: self.bounds, counts, sum: self.sum.load(Ordering::Relaxed) }
    }
}

/// A histogram at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Reading {
    scale: Scale,
    bounds: &'static [u64],
    counts: Vec<u64>,
    sum: u64,
}

impl Reading {
    /// How many values there were.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Their sum, as it is shown.
    pub fn sum(&self) -> f64 {
        self.scale.shown(self.sum)
    }

    /// Upper bounds, the last one infinite, with the values of each bucket alone.
    pub fn buckets(&self) -> Vec<(f64, u64)> {
        let bounds = self.bounds.iter().map(|bound| self.scale.shown(*bound)).chain([f64::INFINITY]);
        bounds.zip(self.counts.iter().copied()).collect()
    }

    /// For people: bounds, values of each bucket, the last past all bounds, and their sum.
    pub fn json(&self) -> Value {
        let bounds: Vec<f64> = self.bounds.iter().map(|bound| self.scale.shown(*bound)).collect();
        json!({ "bounds": bounds, "counts": self.counts, "sum": self.sum() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{BLOCKS, CALL_NANOSECONDS, WORK_NANOSECONDS};

    #[test]
    fn a_value_counts_under_the_smallest_bound_not_below_it() {
        let histogram = Histogram::new(Scale::Count, &[0, 10, 20]);
        for value in [0, 1, 10, 11, 20, 21, 1_000] {
            histogram.record(value);
        }
        let reading = histogram.read();
        assert_eq!(reading.buckets(), [(0.0, 1), (10.0, 2), (20.0, 2), (f64::INFINITY, 2)]);
        assert_eq!((reading.count(), reading.sum()), (7, 1_063.0));
    }

    #[test]
    fn nanoseconds_are_shown_as_seconds() {
        let histogram = Histogram::new(Scale::Seconds, &[250, 2_500_000]);
        histogram.record_time(Duration::from_micros(500));
        let reading = histogram.read();
        assert_eq!(reading.buckets(), [(2.5e-7, 0), (0.0025, 1), (f64::INFINITY, 0)]);
        assert_eq!(reading.sum(), 0.0005);
    }

    #[test]
    fn bounds_ascend_without_repeats() {
        for bounds in [CALL_NANOSECONDS, WORK_NANOSECONDS, BLOCKS] {
            assert!(bounds.windows(2).all(|pair| pair[0] < pair[1]), "{bounds:?}");
        }
    }
}
