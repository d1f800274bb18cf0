#!/bin/sh
# mneme serve behind nginx with TLS, as examples/serve/nginx.conf has it: completions, events as they
# come, states both ways, the page's Origin, and a restart of the server behind it.
set -eu
mneme=$1 source=$2 make_model=$3
for tool in nginx openssl curl; do
    command -v "$tool" >/dev/null || { echo "SKIPPED: no $tool here"; exit 77; }
done
folder=$(mktemp -d)
server='' proxy=''
end() {
    [ -z "$proxy" ] || kill "$proxy" 2>/dev/null || true
    [ -z "$server" ] || kill "$server" 2>/dev/null || true
    wait
    rm -rf "$folder"
}
trap end EXIT
mkdir "$folder/model"
"$make_model" "$folder/model" '{"layers": "kla", "hidden_size": 32, "vocab_size": 260}'
fail() {
    echo "FAILED: $*"
    cat "$folder/log" "$folder/nginx.log" 2>/dev/null || true
    exit 1
}

start_server() {
    : > "$folder/url"
    "$mneme" serve "$folder/model" --port "$1" --drain 0 --quiet > "$folder/url" 2> "$folder/log" &
    server=$!
    for _ in $(seq 100); do
        [ -s "$folder/url" ] && return
        if grep -q "no HTTP" "$folder/log"; then
            echo "SKIPPED: built without libmicrohttpd"
            exit 77
        fi
        sleep 0.1
    done
    fail "the server did not start"
}

start_server 0
port=$(sed 's/.*://' "$folder/url")
openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=mneme.example -keyout "$folder/key" \
    -out "$folder/pem" 2>/dev/null
tls=$((20000 + $$ % 20000))
# The example itself, with this port, this certificate and a server of this test behind it.
sed -e "s|listen 443 ssl|listen 127.0.0.1:$tls ssl|" -e "s|/etc/ssl/mneme.pem|$folder/pem|" \
    -e "s|/etc/ssl/mneme.key|$folder/key|" -e "s|127.0.0.1:8080|127.0.0.1:$port|" \
    "$source/examples/serve/nginx.conf" > "$folder/site.conf"
cat > "$folder/nginx.conf" <<END
worker_processes 1;
daemon off;
pid $folder/pid;
error_log $folder/nginx.log;
events { worker_connections 256; }
http {
    access_log off;
    client_body_temp_path $folder/body;
    proxy_temp_path $folder/proxy;
    fastcgi_temp_path $folder/fastcgi;
    uwsgi_temp_path $folder/uwsgi;
    scgi_temp_path $folder/scgi;
    include $folder/site.conf;
}
END
nginx -p "$folder" -e "$folder/nginx.log" -c "$folder/nginx.conf" &
proxy=$!
ask() {
    path=$1
    shift
    curl -s --max-time 60 --cacert "$folder/pem" --resolve "mneme.example:$tls:127.0.0.1" \
        "https://mneme.example:$tls$path" "$@"
}
# What was written, without what it cost.
choices() { sed 's/,"usage".*//; s/.*"choices"//'; }
for _ in $(seq 100); do
    ask /health >/dev/null && break
    sleep 0.1
done
[ "$(ask /health)" = '{"status":"ok"}' ] || fail "health through nginx: $(ask /health)"
body='{"prompt": "through a proxy", "max_tokens": 20, "seed": 1}'
direct=$(curl -s "http://127.0.0.1:$port/v1/completions" -d "$body" | choices)
[ "$(ask /v1/completions -d "$body" | choices)" = "$direct" ] || fail "a completion"
# Events come one by one: the first long before the last.
stream='{"prompt": "x", "max_tokens": 4000, "ignore_eos": true, "stream": true}'
ask /v1/completions -N -d "$stream" > "$folder/events" &
reader=$!
for _ in $(seq 100); do
    [ -s "$folder/events" ] && break
    sleep 0.05
done
grep -q "DONE" "$folder/events" && fail "events were kept back until the end"
wait "$reader" || fail "a stream"
[ "$(grep -c '^data: ' "$folder/events")" -gt 1000 ] || fail "events were lost"
tail -2 "$folder/events" | grep -q "DONE" || fail "the end of a stream"
id=$(ask /v1/states -d '{"prompt": "kept"}' | sed 's/.*"id":"\([0-9a-f]*\)".*/\1/')
ask "/v1/states/$id/content" > "$folder/state"
ask /v1/states -X PUT --data-binary "@$folder/state" | grep -q '"position":4' || fail "an upload"
ask /v1/models -H "Origin: https://mneme.example:$tls" | grep -q '"data"' || fail "the page's origin"
ask /v1/models -H "Origin: https://other.example" | grep -q '"code":403' || fail "another origin"
head -c 20000000 /dev/zero | ask /v1/completions --data-binary @- | grep -q '"code":413' ||
    fail "a large body"
kill "$server"
wait "$server" || fail "the end of the server"
[ "$(ask /health -o /dev/null -w '%{http_code}')" = 502 ] || fail "a server that is away"
start_server "$port"
[ "$(ask /health)" = '{"status":"ok"}' ] || fail "a server that is back"
echo "ok"
