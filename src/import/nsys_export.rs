//! Nsight Systems' exports as tables: a SQLite database or a directory of Parquet files, of the same names.
//!
//! Columns are read by name: the exporter adds some even in the middle. A database is opened read-only and as immutable, views
//! and virtual tables are never looked at, and no SQL of the file is run.

use crate::trace::foreign::{Cell, ForeignTable};
use rusqlite::limits::Limit;
use rusqlite::types::ValueRef;
use rusqlite::{Connection, OpenFlags};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Texts, rows and statements have at most this many bytes.
const MAX_LENGTH: i32 = 16 << 20;
/// Names are cut after this many bytes.
const MAX_NAME: usize = 4096;

/// An export that is open.
pub enum Export {
    /// `nsys export --type=sqlite`.
    Sqlite {
        /// The database.
        database: Connection,
        /// Its tables.
        tables: BTreeSet<String>,
    },
    /// `nsys export --type=parquetdir`: the file of each table.
    Parquet(BTreeMap<String, PathBuf>),
}

impl Export {
    /// Opens an export.
    ///
    /// # Errors
    /// A sentence that says what is wrong.
    pub fn open(path: &Path) -> Result<Self, String> {
        if path.is_dir() { Self::directory(path) } else { Self::sqlite(path) }
    }

    fn directory(path: &Path) -> Result<Self, String> {
        let mut files = BTreeMap::new();
        for entry in fs::read_dir(path).map_err(|e| format!("cannot read: {e}"))? {
            let file = entry.map_err(|e| format!("cannot read: {e}"))?.path();
            if file.extension().is_some_and(|e| e == "parquet")
                && let Some(name) = file.file_stem().and_then(|s| s.to_str())
            {
                files.insert(name.to_owned(), file.clone());
            }
        }
        Ok(Self::Parquet(files))
    }

    fn sqlite(path: &Path) -> Result<Self, String> {
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX | OpenFlags::SQLITE_OPEN_URI;
        let absolute = std::path::absolute(path).map_err(|e| format!("cannot read: {e}"))?;
        let database = Connection::open_with_flags(uri(&absolute), flags).map_err(|e| wrong(&e))?;
        let set = || -> rusqlite::Result<()> {
            database.set_limit(Limit::SQLITE_LIMIT_LENGTH, MAX_LENGTH)?;
            database.set_limit(Limit::SQLITE_LIMIT_ATTACHED, 0)?;
            database.set_limit(Limit::SQLITE_LIMIT_WORKER_THREADS, 0)?;
            // Nothing of the file's schema may call functions; pages are checked before they are believed.
            database.execute_batch("PRAGMA trusted_schema=OFF; PRAGMA cell_size_check=ON; PRAGMA query_only=ON; PRAGMA mmap_size=0;")
        };
        set().map_err(|e| wrong(&e))?;
        let mut tables = BTreeSet::new();
        {
            let text = "SELECT name FROM sqlite_master WHERE type = 'table' AND sql LIKE 'CREATE TABLE%'";
            let mut statement = database.prepare(text).map_err(|e| wrong(&e))?;
            let names = statement.query_map([], |row| row.get::<_, String>(0)).map_err(|e| wrong(&e))?;
            for name in names {
                tables.insert(name.map_err(|e| wrong(&e))?);
            }
        }
        Ok(Self::Sqlite { database, tables })
    }

    /// The table of this name, or of this name and a version (`NVTX_EVENTS_V2`); of several, the newest.
    pub fn table(&self, name: &str) -> Option<String> {
        let is = |table: &&String| {
            let version = table.strip_prefix(name);
            version.is_some_and(|v| {
                v.is_empty() || v.strip_prefix("_V").is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
            })
        };
        let found = match self {
            Self::Sqlite { tables, .. } => tables.iter().filter(is).max_by_key(|t| (t.len(), (*t).clone())),
            Self::Parquet(files) => files.keys().filter(is).max_by_key(|t| (t.len(), (*t).clone())),
        };
        found.cloned()
    }

    /// Hands over the wanted columns of all rows of a table. A column that is not there is null in each.
    ///
    /// # Errors
    /// When the table cannot be read, and what `take` returned.
    pub fn rows(&self, table: &str, columns: &[&str], mut take: impl FnMut(&[Cell<'_>]) -> Result<(), String>) -> Result<(), String> {
        match self {
            Self::Sqlite { database, .. } => select(database, table, columns, "", &mut take),
            Self::Parquet(files) => {
                let path = files.get(table).ok_or_else(|| format!("no table {table}"))?;
                let file = ForeignTable::open(path).map_err(|e| e.to_string())?;
                file.each(columns, |row| take(row).map_err(Stopped::Taker)).map_err(Stopped::into_text)
            }
        }
    }

    /// The texts of these ids of `StringIds`, each cut to a name's length.
    ///
    /// # Errors
    /// When the table cannot be read.
    pub fn strings(&self, ids: &BTreeSet<i64>) -> Result<BTreeMap<i64, String>, String> {
        let mut found = BTreeMap::new();
        let Some(table) = self.table("StringIds") else { return Ok(found) };
        let mut keep = |row: &[Cell<'_>]| {
            if let [Cell::Int(id), Cell::Text(text)] = row
                && ids.contains(id)
            {
                found.insert(*id, text.chars().take(MAX_NAME).collect());
            }
            Ok(())
        };
        self.rows(&table, &["id", "value"], &mut keep)?;
        Ok(found)
    }
}

/// Why reading a table stopped.
enum Stopped {
    Table(crate::trace::TraceError),
    Taker(String),
}

impl From<crate::trace::TraceError> for Stopped {
    fn from(error: crate::trace::TraceError) -> Self {
        Self::Table(error)
    }
}

impl Stopped {
    fn into_text(self) -> String {
        match self {
            Self::Table(error) => error.to_string(),
            Self::Taker(text) => text,
        }
    }
}

/// Selects the columns that are there; names are quoted, and only those that the table has are named at all.
fn select(
    database: &Connection,
    table: &str,
    columns: &[&str],
    rest: &str,
    take: &mut dyn FnMut(&[Cell<'_>]) -> Result<(), String>,
) -> Result<(), String> {
    let in_table = |e: &rusqlite::Error| format!("table {table}: {}", wrong(e));
    let mut has = BTreeSet::new();
    {
        // Generated columns are not listed: they would run expressions of the file.
        let mut statement = database.prepare(&format!("PRAGMA table_info({})", quoted(table))).map_err(|e| in_table(&e))?;
        let names = statement.query_map([], |row| row.get::<_, String>(1)).map_err(|e| in_table(&e))?;
        for name in names {
            has.insert(name.map_err(|e| in_table(&e))?);
        }
    }
    let wanted: Vec<String> = columns.iter().map(|c| if has.contains(*c) { quoted(c) } else { "NULL".to_owned() }).collect();
    let text = format!("SELECT {} FROM {}{rest}", wanted.join(", "), quoted(table));
    let mut statement = database.prepare(&text).map_err(|e| in_table(&e))?;
    let mut rows = statement.query([]).map_err(|e| in_table(&e))?;
    while let Some(row) = rows.next().map_err(|e| in_table(&e))? {
        let mut cells = Vec::with_capacity(columns.len());
        for i in 0..columns.len() {
            cells.push(match row.get_ref(i).map_err(|e| in_table(&e))? {
                ValueRef::Integer(n) => Cell::Int(n),
                ValueRef::Text(bytes) => std::str::from_utf8(bytes).map_or(Cell::Null, Cell::Text),
                ValueRef::Null | ValueRef::Real(_) | ValueRef::Blob(_) => Cell::Null,
            });
        }
        take(&cells)?;
    }
    Ok(())
}

fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// What went wrong in the database, in words that say what to do.
fn wrong(error: &rusqlite::Error) -> String {
    if error.sqlite_error_code() == Some(rusqlite::ErrorCode::NotADatabase) {
        return "not a SQLite database, or what an interrupted export left behind; run nsys export --type=sqlite again".into();
    }
    format!("SQLite: {error}")
}

/// A path as SQLite's URI; immutable, so that no journal of the directory is looked at.
fn uri(path: &Path) -> String {
    use std::fmt::Write;
    let mut uri = "file:".to_owned();
    for &byte in path.as_os_str().as_encoded_bytes() {
        if byte.is_ascii_alphanumeric() || b"/-_.~".contains(&byte) {
            uri.push(char::from(byte));
        } else {
            let _ = write!(uri, "%{byte:02x}");
        }
    }
    uri + "?immutable=1&mode=ro"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_cannot_end_the_uri() {
        assert_eq!(uri(Path::new("/a b?mode=rwc#x%20")), "file:/a%20b%3fmode%3drwc%23x%2520?immutable=1&mode=ro");
        assert_eq!(quoted("a\"; DROP"), "\"a\"\"; DROP\"");
    }

    #[test]
    fn only_plain_tables_and_columns_are_looked_at() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x?y.sqlite");
        let database = Connection::open(&path).unwrap();
        database
            .execute_batch(
                "CREATE TABLE T_V2(a INTEGER, b TEXT, c INTEGER GENERATED ALWAYS AS (length(zeroblob(1000))) VIRTUAL);
                 INSERT INTO T_V2(a, b) VALUES (1, 'x'), (NULL, NULL), (3, 2.5);
                 CREATE VIEW T AS WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT n AS a FROM r;",
            )
            .unwrap();
        drop(database);
        let export = Export::open(&path).unwrap();
        assert_eq!((export.table("T").as_deref(), export.table("U")), (Some("T_V2"), None));
        let mut rows = Vec::new();
        export
            .rows("T_V2", &["b", "a", "c", "none"], |row| {
                rows.push((row[0].text().map(str::to_owned), row[1].int(), row[2] == Cell::Null && row[3] == Cell::Null));
                Ok(())
            })
            .unwrap();
        let want = [(Some("x".to_owned()), Some(1), true), (None, None, true), (Some("2.5".to_owned()), Some(3), true)];
        assert_eq!(rows, want);
        assert_eq!(export.rows("T_V2", &["a"], |_| Err("stop".into())), Err("stop".into()));
        std::fs::write(&path, [0; 4096]).unwrap();
        let error = Export::open(&path).and_then(|e| e.rows("T", &["a"], |_| Ok(()))).unwrap_err();
        assert!(error.contains("interrupted export") || error.contains("no such table"), "{error}");
    }
}
