//! Tables of numbers as text, in columns.

use std::{fmt, ops::Range};

use comfy_table::{CellAlignment, presets::NOTHING};

/// Columns with two spaces between them and no lines.
#[derive(Debug)]
pub struct Table(comfy_table::Table);

impl Table {
    pub fn new<T: ToString>(titles: impl IntoIterator<Item = T>) -> Self {
        let mut table = comfy_table::Table::new();
        table.load_style(NOTHING);
        table.set_header(titles.into_iter().map(|title| title.to_string()));
        for column in table.column_iter_mut() {
            column.set_padding((0, 2));
        }
        Self(table)
    }

    /// Aligns columns of numbers to the right.
    #[must_use]
    pub fn right(mut self, columns: Range<usize>) -> Self {
        for index in columns {
            if let Some(column) = self.0.column_mut(index) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        self
    }

    pub fn row<T: ToString>(&mut self, cells: impl IntoIterator<Item = T>) {
        self.0.add_row(cells.into_iter().map(|cell| cell.to_string()));
    }
}

impl fmt::Display for Table {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(formatter, "{}", self.0.trim_fmt())
    }
}

/// Returns a number with four significant digits, or all digits of a large number.
pub fn number(value: f64) -> String {
    let digits = match value.abs() {
        size if size >= 1000.0 => 0,
        size if size >= 100.0 => 1,
        size if size >= 10.0 => 2,
        _ => 3,
    };
    format!("{value:.digits$}")
}

/// Returns the number, or nothing in its place.
pub fn maybe(value: Option<f64>) -> String {
    value.map(number).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::{Table, number};

    #[test]
    fn columns_are_aligned_and_lines_end_with_their_last_cell() {
        let mut table = Table::new(["metric", "value", "goal"]).right(1..2);
        table.row(["rows", "3", "<= 3 met"]);
        table.row(["round trip", "12.50", ""]);
        let expected = "metric      value  goal\nrows            3  <= 3 met\nround trip  12.50\n";
        assert_eq!(table.to_string(), expected);
    }

    #[test]
    fn a_number_has_four_digits_or_all_of_its_own() {
        assert_eq!(
            [0.5, 12.345, 123.45, 98765.4].map(number),
            ["0.500", "12.35", "123.5", "98765"]
        );
    }
}
