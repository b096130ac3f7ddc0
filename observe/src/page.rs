//! The page for browsers, which the program contains. It has no data of its own: it asks `/v1`, as every reader does.
//!
//! Invariant: a browser loads nothing for the page from elsewhere, and runs no script that is not a file of the page.

use axum::body::Body;
use axum::http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName};
use axum::http::{HeaderValue, StatusCode};
use axum::response::Response;
use rust_embed::Embed;

/// What the page may do.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; \
     connect-src 'self'; font-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'";
/// Headers of every file.
const HEADERS: [(HeaderName, &str); 4] = [
    (CONTENT_SECURITY_POLICY, POLICY),
    (HeaderName::from_static("x-content-type-options"), "nosniff"),
    (HeaderName::from_static("referrer-policy"), "no-referrer"),
    // Another version of the program may answer next time.
    (CACHE_CONTROL, "no-cache"),
];

#[derive(Embed)]
#[folder = "ui/dist"]
struct Files;

/// Returns a file of the page; none if there is no such file. The path is within the page's folder.
pub fn file(path: &str) -> Option<Response> {
    let file = Files::get(path)?;
    let mut response = Response::new(Body::from(file.data));
    *response.status_mut() = StatusCode::OK;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type(path)));
    for (name, value) in HEADERS {
        headers.insert(name, HeaderValue::from_static(value));
    }
    Some(response)
}

fn content_type(path: &str) -> &'static str {
    match path.rsplit_once('.').map(|(_, ending)| ending) {
        Some("html") => "text/html; charset=utf-8",
        Some("js" | "mjs") => "text/javascript; charset=utf-8",
        Some("css") => "text/css; charset=utf-8",
        Some("svg") => "image/svg+xml",
        Some("png") => "image/png",
        Some("ico") => "image/x-icon",
        Some("woff2") => "font/woff2",
        Some("json") => "application/json",
        Some("txt") => "text/plain; charset=utf-8",
        _ => "application/octet-stream",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_runs_its_own_files_alone() {
        let page = file("index.html").unwrap();
        let header = |name: HeaderName| page.headers()[name].to_str().unwrap().to_owned();
        assert_eq!(header(CONTENT_TYPE), "text/html; charset=utf-8");
        let policy = header(CONTENT_SECURITY_POLICY);
        assert!(
            policy.starts_with("default-src 'none'; script-src 'self'; "),
            "{policy}"
        );
        assert!(!policy.contains("unsafe") && !policy.contains("http"), "{policy}");
        assert_eq!(
            header(HeaderName::from_static("x-content-type-options")),
            "nosniff"
        );
    }

    #[test]
    fn nothing_outside_of_the_folder_is_a_file_of_the_page() {
        for path in [
            "",
            "/",
            "../Cargo.toml",
            "assets/../../../Cargo.toml",
            "/etc/passwd",
            "index.html/",
        ] {
            assert!(file(path).is_none(), "{path}");
        }
    }

    #[test]
    fn files_have_the_types_that_browsers_expect() {
        assert_eq!(content_type("assets/main.js"), "text/javascript; charset=utf-8");
        assert_eq!(content_type("assets/style.css"), "text/css; charset=utf-8");
        assert_eq!(content_type("assets/icon.svg"), "image/svg+xml");
        assert_eq!(content_type("LICENSE"), "application/octet-stream");
    }
}
