//! Checks everything in pages that a program can check: links and anchors lead somewhere, files and functions that
//! pages name in backticks exist, lines fit on a screen, and the table of contents has every page. Lines of comments in
//! sources must fit as well.
//!
//! A name `folder/file.rs` in backticks may leave out the beginning of its path. `folder/file.rs::name` and
//! `some/folder::name` need a function of that name in that file, or in a file of that folder.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt, fs,
    ops::Range,
    path::Path,
};

use anyhow::{Context, Result, bail};
use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

use crate::build::root;

/// Pages beside those of `docs/`.
const PAGES: [&str; 5] = [
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
];
/// The table of contents.
const CONTENTS: &str = "docs/SUMMARY.md";
/// The page whose tests are a proof: it names each test with its file.
const PROOF: &str = "docs/workflows.md";
const PAGE: &str = ".md";
/// Endings of the repository's files: a path with one must be a file, wherever the path begins.
const ENDINGS: [&str; 6] = [PAGE, ".proto", ".rs", ".sh", ".toml", ".yaml"];
const LONGEST_LINE: usize = 120;
/// A name with at least this many underscores is a test's name.
const WORDS_OF_A_TEST: usize = 3;

/// Texts of sources and pages, by path from the repository's root.
pub type Tree = BTreeMap<String, String>;

#[derive(Debug, PartialEq, Eq)]
struct Problem {
    page: String,
    line: usize,
    what: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}: {}", self.page, self.line, self.what)
    }
}

/// Checks all pages and prints all problems.
pub fn run() -> Result<()> {
    let tree = tree()?;
    let problems = check(&tree);
    for problem in &problems {
        eprintln!("{problem}");
    }
    if problems.is_empty() {
        return Ok(());
    }
    bail!("{} problems in pages", problems.len())
}

/// Reads all files of the repository.
pub fn tree() -> Result<Tree> {
    let mut tree = Tree::new();
    collect(&root(), "", &mut tree)?;
    Ok(tree)
}

/// Collects the files below a folder, except for built files, npm's packages and git's own.
fn collect(folder: &Path, path: &str, tree: &mut Tree) -> Result<()> {
    let failed = || format!("cannot read {}", folder.display());
    for entry in fs::read_dir(folder).with_context(failed)? {
        let entry = entry.with_context(failed)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let inner = format!("{path}{name}");
        if entry.file_type().with_context(failed)?.is_dir() {
            if !["target", "node_modules", ".git"].contains(&name.as_str()) {
                collect(&entry.path(), &format!("{inner}/"), tree)?;
            }
        } else {
            let is_read = has_ending(&inner, &[PAGE, ".rs"]);
            let text = if is_read {
                fs::read_to_string(entry.path())
            } else {
                Ok(String::new())
            };
            tree.insert(
                inner.clone(),
                text.with_context(|| format!("cannot read {inner}"))?,
            );
        }
    }
    Ok(())
}

fn check(tree: &Tree) -> Vec<Problem> {
    let pages = tree
        .iter()
        .filter(|(path, _)| PAGES.contains(&path.as_str()) || is_in_book(path));
    pages
        .flat_map(|(path, text)| check_page(tree, path, text))
        .chain(missing_contents(tree))
        .chain(tree.iter().flat_map(|(path, text)| long_comments(path, text)))
        .collect()
}

/// Returns the lines of comments that are too long: the formatter leaves comments alone.
fn long_comments(path: &str, text: &str) -> Vec<Problem> {
    if !has_ending(path, &[".rs"]) {
        return Vec::new();
    }
    let is_long = |line: &str| line.trim_start().starts_with("//") && !line.contains("://");
    let comments = text.lines().enumerate().filter(|(_, line)| is_long(line));
    let long = comments.filter_map(|(index, line)| {
        let length = line.chars().count();
        (length > LONGEST_LINE).then(|| Problem {
            page: path.to_owned(),
            line: index + 1,
            what: format!("{length} columns, at most {LONGEST_LINE}"),
        })
    });
    long.collect()
}

/// Whether the path is a page of `docs/`.
fn is_in_book(path: &str) -> bool {
    path.starts_with("docs/") && has_ending(path, &[PAGE])
}

/// Returns the pages of `docs/` that the table of contents leaves out.
fn missing_contents(tree: &Tree) -> Vec<Problem> {
    let Some(contents) = tree.get(CONTENTS) else {
        return Vec::new();
    };
    let links = Parsed::of(contents).links;
    let listed: BTreeSet<String> = links.iter().map(|(link, _)| format!("docs/{link}")).collect();
    let is_missing = |page: &&String| is_in_book(page) && *page != CONTENTS && !listed.contains(*page);
    let problem = |page: &String| Problem {
        page: CONTENTS.to_owned(),
        line: 1,
        what: format!("{page} is not in the table of contents: add a line for it"),
    };
    tree.keys().filter(is_missing).map(problem).collect()
}

fn check_page(tree: &Tree, page: &str, text: &str) -> Vec<Problem> {
    let parsed = Parsed::of(text);
    let mut found: Vec<(usize, String)> = Vec::new();
    for (target, at) in &parsed.links {
        found.extend(missing_target(tree, page, target).map(|what| (*at, what)));
    }
    for (code, at) in &parsed.codes {
        for word in code.split_whitespace() {
            found.extend(missing_name(tree, page, word).map(|what| (*at, what)));
        }
    }
    let mut start = 0;
    for line in text.split_inclusive('\n') {
        let is_free = line.contains("://") || parsed.tables.iter().any(|table| table.contains(&start));
        let length = line.trim_end().chars().count();
        if length > LONGEST_LINE && !is_free {
            found.push((start, format!("{length} columns, at most {LONGEST_LINE}")));
        }
        start += line.len();
    }
    found.sort_unstable();
    let line_of = |at: usize| text[..at].matches('\n').count() + 1;
    let problem = |(at, what)| Problem {
        page: page.to_owned(),
        line: line_of(at),
        what,
    };
    found.into_iter().map(problem).collect()
}

/// The parts of a page that are checked, each with where it begins.
#[derive(Default)]
struct Parsed {
    links: Vec<(String, usize)>,
    codes: Vec<(String, usize)>,
    anchors: BTreeSet<String>,
    tables: Vec<Range<usize>>,
}

impl Parsed {
    fn of(text: &str) -> Self {
        let mut parsed = Self::default();
        let mut seen: HashMap<String, usize> = HashMap::new();
        let mut heading: Option<String> = None;
        for (event, range) in Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter() {
            match event {
                Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                    parsed.links.push((dest_url.into_string(), range.start));
                }
                Event::Start(Tag::Table(_)) => parsed.tables.push(range),
                Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
                Event::End(TagEnd::Heading(_)) => {
                    let slug = slug(&heading.take().unwrap_or_default());
                    let times = seen.entry(slug.clone()).or_default();
                    parsed.anchors.insert(if *times == 0 {
                        slug
                    } else {
                        format!("{slug}-{times}")
                    });
                    *times += 1;
                }
                Event::Code(code) => {
                    if let Some(heading) = &mut heading {
                        heading.push_str(&code);
                    }
                    parsed.codes.push((code.into_string(), range.start));
                }
                Event::Text(text) => {
                    if let Some(heading) = &mut heading {
                        heading.push_str(&text);
                    }
                }
                Event::Html(html) | Event::InlineHtml(html) => {
                    let ids = html.split("id=\"").skip(1);
                    parsed
                        .anchors
                        .extend(ids.filter_map(|rest| Some(rest.split_once('"')?.0.to_owned())));
                }
                _ => {}
            }
        }
        parsed
    }
}

/// Returns the anchor that GitHub and mdBook give to a heading.
fn slug(heading: &str) -> String {
    let kept = |char: char| match char {
        ' ' => Some('-'),
        '-' | '_' => Some(char),
        _ => char.is_alphanumeric().then(|| char.to_ascii_lowercase()),
    };
    heading.trim().chars().filter_map(kept).collect()
}

/// Returns what is wrong with a relative link, if anything.
fn missing_target(tree: &Tree, page: &str, target: &str) -> Option<String> {
    if target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
    let folder = page.rsplit_once('/').map_or("", |(folder, _)| folder);
    let path = if path.is_empty() {
        Some(page.to_owned())
    } else {
        join(folder, path)
    };
    let Some(path) = path.filter(|path| exists(tree, path)) else {
        return Some(format!("link to {target}: no such file"));
    };
    let text = tree.get(&path).filter(|_| has_ending(&path, &[PAGE]));
    if !anchor.is_empty() && text.is_some_and(|text| !Parsed::of(text).anchors.contains(anchor)) {
        return Some(format!(
            "link to {target}: {path} has no heading with the anchor {anchor:?}"
        ));
    }
    None
}

/// Returns a path from the repository's root; none if it leads out of the repository.
fn join(folder: &str, path: &str) -> Option<String> {
    let mut parts: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            _ => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

fn exists(tree: &Tree, path: &str) -> bool {
    path.is_empty() || tree.contains_key(path) || is_folder(tree, path)
}

fn is_folder(tree: &Tree, path: &str) -> bool {
    let inner = format!("{path}/");
    let next = tree.range(inner.clone()..).next();
    next.is_some_and(|(path, _)| path.starts_with(&inner))
}

fn has_ending(path: &str, endings: &[&str]) -> bool {
    endings.iter().any(|ending| path.ends_with(ending))
}

/// Returns what is wrong with a word in backticks, if it names something of the repository.
fn missing_name(tree: &Tree, page: &str, word: &str) -> Option<String> {
    let is_plain = |char: char| char.is_ascii_alphanumeric() || "/._-".contains(char);
    let (path, function) = match word.split_once("::") {
        Some((path, function)) => (path, Some(function)),
        None => (word, None),
    };
    let path = path.trim_end_matches('/');
    if !path.contains('/') {
        let is_test = path.matches('_').count() >= WORDS_OF_A_TEST && page == PROOF;
        return is_test.then(|| format!("{word}: a test is named with its file, as folder/file.rs::{path}"));
    }
    if !path.chars().all(is_plain) || path.starts_with(['/', '.']) {
        return None;
    }
    let files: Vec<&String> = match function {
        None if is_ours(tree, path) => files_of(tree, path).collect(),
        Some(_) => files_of(tree, path).collect(),
        None => return None,
    };
    if files.is_empty() {
        return Some(format!("{word}: no such file"));
    }
    let function = function?;
    let is_there = files.into_iter().any(|file| has_function(&tree[file], function));
    (!is_there).then(|| format!("{word}: no function {function} there"))
}

/// Whether a path must be in the repository: it has the ending of a source, or begins with one of the repository's
/// folders.
fn is_ours(tree: &Tree, path: &str) -> bool {
    let first = path.split('/').next().unwrap_or_default();
    has_ending(path, &ENDINGS) || is_folder(tree, first)
}

/// Returns the files that a path names, which may begin anywhere: the file itself, or all in the folder.
fn files_of<'a>(tree: &'a Tree, path: &'a str) -> impl Iterator<Item = &'a String> {
    let (file, folder) = (format!("/{path}"), format!("/{path}/"));
    tree.keys().filter(move |known| {
        let known = format!("/{known}");
        known.ends_with(&file) || known.contains(&folder)
    })
}

fn has_function(text: &str, name: &str) -> bool {
    let call = format!("fn {name}");
    let ends = |rest: &str| rest.starts_with(['(', '<']);
    text.match_indices(&call)
        .any(|(at, _)| ends(&text[at + call.len()..]))
}

#[cfg(test)]
mod tests {
    use super::{Tree, check, slug};

    /// Returns the problems of pages in a small repository.
    fn problems(pages: &[(&str, &str)]) -> Vec<String> {
        let files = [
            (
                "operator/src/model/rows.rs",
                "fn packs_rows() {}\npub fn of<T>(_: T) {}",
            ),
            (
                "e2e/tests/cluster/rights.rs",
                "#[test]\nfn a_tenant_reads_its_own() {}",
            ),
            ("install/10-crds.yaml", ""),
        ];
        let all = files.iter().chain(pages);
        let tree: Tree = all
            .map(|(path, text)| ((*path).to_owned(), (*text).to_owned()))
            .collect();
        check(&tree).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn table_of_contents_has_every_page() {
        let pages = [
            ("docs/SUMMARY.md", "# Contents\n\n- [A](a.md)\n"),
            ("docs/a.md", "# A"),
            ("docs/adr/0001-b.md", "# B"),
            ("README.md", "# Hello"),
        ];
        let missing =
            "docs/SUMMARY.md:1: docs/adr/0001-b.md is not in the table of contents: add a line for it";
        assert_eq!(problems(&pages), [missing]);
    }

    #[test]
    fn links_and_anchors_lead_to_what_is_there() {
        let guide = "# Guide\n\n## The way out: `egress`\n\n## Twice\n\n## Twice\n\n<a id=\"old\"></a>\n\n[up](../README.md#hello)";
        let readme = "# Hello\n\n[a](docs/guide.md#the-way-out-egress) [b](docs/guide.md#twice-1) [c](docs/guide.md#old)\n\
                      [d](docs) [e](https://example.com/none#x) [f](#hello) [g](install/10-crds.yaml)";
        assert_eq!(
            problems(&[("docs/guide.md", guide), ("README.md", readme)]),
            Vec::<String>::new()
        );
        let readme = "# Hello\n\n[a](docs/none.md)\n[b](docs/guide.md#none)\n[c](#none)\n[d](../outside.md)";
        assert_eq!(
            problems(&[("docs/guide.md", guide), ("README.md", readme)]),
            [
                "README.md:3: link to docs/none.md: no such file",
                "README.md:4: link to docs/guide.md#none: docs/guide.md has no heading with the anchor \"none\"",
                "README.md:5: link to #none: README.md has no heading with the anchor \"none\"",
                "README.md:6: link to ../outside.md: no such file",
            ]
        );
    }

    #[test]
    fn files_and_functions_in_backticks_exist() {
        let page = "`operator/src/model/rows.rs` `model/rows.rs::packs_rows` `src/model::of` `cluster/rights.rs` `install/`\n\
                    `kubectl apply -f install/10-crds.yaml` `default/kubernetes` `/var/lib/x.rs` `target/x` `a::b`\n\n\
                    ```\noperator/none.rs\n```\n";
        assert_eq!(problems(&[("docs/a.md", page)]), Vec::<String>::new());
        let page = "`operator/src/none.rs`\n`model/none.rs`\n`model/rows.rs::packs`\n`src/none::of`\n`sh install/none.sh`";
        assert_eq!(
            problems(&[("docs/a.md", page)]),
            [
                "docs/a.md:1: operator/src/none.rs: no such file",
                "docs/a.md:2: model/none.rs: no such file",
                "docs/a.md:3: model/rows.rs::packs: no function packs there",
                "docs/a.md:4: src/none::of: no such file",
                "docs/a.md:5: install/none.sh: no such file",
            ]
        );
    }

    #[test]
    fn the_workflows_name_each_test_with_its_file() {
        let page = "| step | test |\n|---|---|\n| 1 | `cluster/rights.rs::a_tenant_reads_its_own` |\n| 2 | `a_tenant_reads_its_own` |\n\
                    | 3 | `cluster/rights.rs::nobody_reads_it` |\n";
        assert_eq!(
            problems(&[("docs/workflows.md", page)]),
            [
                "docs/workflows.md:4: a_tenant_reads_its_own: a test is named with its file, as folder/file.rs::a_tenant_reads_its_own",
                "docs/workflows.md:5: cluster/rights.rs::nobody_reads_it: no function nobody_reads_it there",
            ]
        );
        assert!(problems(&[("docs/metrics.md", "`network_policies_not_enforced`")]).is_empty());
    }

    #[test]
    fn only_tables_and_addresses_are_longer_than_a_line() {
        let long = "x ".repeat(60);
        let table = format!("| a |\n|---|\n| {long} |\n");
        let page = format!(
            "{table}\n{long}y\n\nhttps://example.com/{long}\n\n    {long}\n{}\n",
            "é".repeat(120)
        );
        assert_eq!(
            problems(&[("docs/a.md", &page)]),
            [
                "docs/a.md:5: 121 columns, at most 120",
                "docs/a.md:9: 123 columns, at most 120",
            ]
        );
    }

    #[test]
    fn comments_are_no_longer_than_a_line() {
        let long = "x".repeat(120);
        let source =
            format!("/// {long}\nlet text = \"{long}\";\n    // https://example.com/{long}\n//! é{long}\n");
        assert_eq!(
            problems(&[("a/src/b.rs", &source)]),
            [
                "a/src/b.rs:1: 124 columns, at most 120",
                "a/src/b.rs:4: 125 columns, at most 120",
            ]
        );
    }

    #[test]
    fn an_anchor_is_the_headings_words_in_lower_case() {
        assert_eq!(slug("Who may do what?"), "who-may-do-what");
        assert_eq!(slug("VPC: create"), "vpc-create");
        assert_eq!(slug("What_is - left"), "what_is---left");
    }
}
