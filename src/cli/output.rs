//! Tables, JSON and progress.
//!
//! A table's columns are as wide as their longest cell, numbers to the right; what
//! comes from a peer is shown without control characters, so that no worker's name
//! can move a terminal's cursor.

use std::io::{self, Write};

use anstyle::Style;
use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};
use serde_json::Value;

const HEADING: Style = Style::new().bold();

/// Rows under a heading.
pub(super) struct Table {
    heading: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(super) fn new(heading: &[&'static str]) -> Self {
        Table { heading: heading.to_vec(), rows: Vec::new() }
    }

    pub(super) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().map(|cell| plain(&cell)).collect());
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    pub(super) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let width = |column: usize| {
            let cells = self.rows.iter().map(|row| row[column].chars().count());
            cells.chain([self.heading[column].len()]).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.heading.len()).map(width).collect();
        let is_number = |column: usize| {
            !self.rows.is_empty()
                && self.rows.iter().all(|row| {
                    !row[column].is_empty()
                        && row[column].bytes().all(|b| b.is_ascii_digit() || b"-.%".contains(&b))
                })
        };
        let right: Vec<bool> = (0..self.heading.len()).map(is_number).collect();
        let line = |cells: &mut dyn Iterator<Item = &str>| {
            let mut line = String::new();
            for (column, cell) in cells.enumerate() {
                let width = widths[column];
                let gap = if column == 0 { "" } else { "  " };
                line += &if right[column] {
                    format!("{gap}{cell:>width$}")
                } else {
                    format!("{gap}{cell:<width$}")
                };
            }
            line.trim_end().to_owned()
        };
        writeln!(out, "{HEADING}{}{HEADING:#}", line(&mut self.heading.iter().copied()))?;
        for row in &self.rows {
            writeln!(out, "{}", line(&mut row.iter().map(String::as_str)))?;
        }
        Ok(())
    }
}

/// Text of a peer as one line of what can be printed.
pub(super) fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// A hash in JSON: text, as its numbers are exact to 53 bits only in most readers.
pub(super) fn hash(hash: i64) -> Value {
    hash.to_string().into()
}

pub(super) fn json(out: &mut dyn Write, value: &Value) -> io::Result<()> {
    writeln!(out, "{value}")
}

/// Progress over so many steps, seen on a terminal alone.
pub(super) fn progress(steps: u64, unit: &str) -> ProgressBar {
    let bar = ProgressBar::new(steps);
    styled(bar, &format!("{{bar:40}} {{percent:>3}} % {unit}, {{eta}} left"))
}

/// Progress without a known end.
pub(super) fn spinner(unit: &str) -> ProgressBar {
    styled(ProgressBar::new_spinner(), &format!("{{spinner}} {{pos}} {unit} {{msg}}"))
}

fn styled(bar: ProgressBar, template: &str) -> ProgressBar {
    // Gone with the work, however that ends, so that it stands in no error's way.
    let bar = bar.with_finish(ProgressFinish::AndClear);
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        // A template of this file is well formed; the default style would do.
        Err(_) => bar,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_control_characters_are_gone() {
        let mut table = Table::new(&["worker", "blocks"]);
        table.row(["w-long-name".to_owned(), "7".to_owned()]);
        table.row(["w\u{1b}[2J\n".to_owned(), "1234567".to_owned()]);
        let mut out = Vec::new();
        table.write(&mut out).expect("written");
        let text = String::from_utf8(out).expect("UTF-8");
        let lines: Vec<&str> = text.lines().collect();
        let heading = lines[0].trim_start_matches("\u{1b}[1m").trim_end_matches("\u{1b}[0m");
        assert_eq!(heading, "worker        blocks");
        assert_eq!(lines[1..], ["w-long-name        7", "w\u{fffd}[2J\u{fffd}       1234567"]);
    }
}
