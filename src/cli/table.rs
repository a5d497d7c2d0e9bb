//! Tables for people.

use std::io::Write;

use serde_json::Value;

/// A table that is written in parts. Its columns only grow wider.
pub(super) struct Table<const N: usize> {
    titles: [&'static str; N],
    /// What is written where there are no rows.
    none: &'static str,
    /// Of the columns; all 0 before the first row.
    widths: [usize; N],
}

impl<const N: usize> Table<N> {
    pub(super) fn new(titles: [&'static str; N], none: &'static str) -> Self {
        Self { titles, none, widths: [0; N] }
    }

    pub(super) fn write(
        &mut self,
        rows: impl IntoIterator<Item = [String; N]>,
        out: &mut dyn Write,
    ) -> anyhow::Result<()> {
        let mut rows: Vec<[String; N]> = rows.into_iter().collect();
        if !self.is_begun() && !rows.is_empty() {
            rows.insert(0, self.titles.map(str::to_owned));
        }
        for (column, width) in self.widths.iter_mut().enumerate() {
            *width = rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0).max(*width);
        }
        for row in rows {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(self.widths) {
                line.push_str(&format!("{cell:<width$}  "));
            }
            writeln!(out, "{}", line.trim_end())?;
        }
        Ok(())
    }

    pub(super) fn end(self, out: &mut dyn Write) -> anyhow::Result<()> {
        if !self.is_begun() {
            writeln!(out, "{}", self.none)?;
        }
        Ok(())
    }

    fn is_begun(&self) -> bool {
        self.widths != [0; N]
    }
}

/// Clients choose paths and keys, and operators write reasons: what would drive the terminal is escaped.
pub(super) fn text(value: &Value) -> String {
    let text = match value {
        Value::Null => return "-".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    shown(&text)
}

/// A text from elsewhere, as a terminal may get it.
pub(super) fn shown(text: &str) -> String {
    text.chars().fold(String::new(), |mut shown, c| {
        if c.is_control() || is_reordering(c) {
            shown.extend(c.escape_unicode())
        } else {
            shown.push(c)
        }
        shown
    })
}

/// Whether a character changes the order in which a terminal shows others (Unicode Standard Annex 9, 2), or is not seen itself.
fn is_reordering(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}')
}
